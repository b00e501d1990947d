// visit_format, visit_scaled_format: from a Format to its struct. The only switches over formats.
#pragma once

#include <utility>

#include "shoal/base/error.h"
#include "shoal/quant/affine_int.h"
#include "shoal/quant/format.h"
#include "shoal/quant/fp8_e4m3.h"
#include "shoal/quant/gguf_mxfp4.h"
#include "shoal/quant/gguf_nvfp4.h"
#include "shoal/quant/iq2_s.h"
#include "shoal/quant/iq2_xs.h"
#include "shoal/quant/iq2_xxs.h"
#include "shoal/quant/iq3_s.h"
#include "shoal/quant/iq3_xxs.h"
#include "shoal/quant/iq4_nl.h"
#include "shoal/quant/iq4_xs.h"
#include "shoal/quant/mxfp4.h"
#include "shoal/quant/nvfp4.h"
#include "shoal/quant/plain.h"
#include "shoal/quant/q2_k.h"
#include "shoal/quant/q3_k.h"
#include "shoal/quant/q4_0.h"
#include "shoal/quant/q4_1.h"
#include "shoal/quant/q4_k.h"
#include "shoal/quant/q5_0.h"
#include "shoal/quant/q5_1.h"
#include "shoal/quant/q5_k.h"
#include "shoal/quant/q6_k.h"
#include "shoal/quant/q8_0.h"

namespace shoal {

// Throws kInternal. Out of line: a source compiled per instruction set must not bring its own copy of what fail()
// needs.
[[noreturn]] void wrong_kind_of_format(Format format);

// Calls visitor.operator()<Struct>() with the format's struct and returns what it returns:
//
//   visit_format(format, [&]<class F>() { F::decode(block, values); });
//
// For plain and block formats; a scaled one is kInternal.
template <class Visitor>
decltype(auto) visit_format(Format format, Visitor&& visitor) {
  switch (format) {
#define SHOAL_FORMAT(Struct, header) \
  case Format::k##Struct:            \
    return std::forward<Visitor>(visitor).template operator()<Struct>();
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
    default: break;
  }
  wrong_kind_of_format(format);
}

// The same for scaled formats; any other is kInternal.
template <class Visitor>
decltype(auto) visit_scaled_format(Format format, Visitor&& visitor) {
  switch (format) {
#define SHOAL_FORMAT(Struct, header)
#define SHOAL_SCALED_FORMAT(Struct, header) \
  case Format::k##Struct:                   \
    return std::forward<Visitor>(visitor).template operator()<Struct>();
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
#undef SHOAL_SCALED_FORMAT
    default: break;
  }
  wrong_kind_of_format(format);
}

}  // namespace shoal
