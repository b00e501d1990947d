// Formats whose rows run along k: 16 bytes of every lane's row become vectors of weights, one a column.
//
//   kBytes, kWords   bytes of a step, units of code in it
//   kCodes           codes of a unit: of one word, or of three where codes cross words
//   zeros_of         from the zero points of a group to what weight<J> subtracts
//   weight<J>        (number - zero) of code J of the unit that starts at `word`; e2m1 numbers are doubled
//
// A small integer becomes a float by setting the bits above it: 0x4b000000 | n is 2^23 + n, and subtracting 2^23 + zero
// is exact. That costs less than a conversion. AVX-512 has tables of 16 floats instead.
#pragma once

#include "shoal/ops/moe/moe_lanes.h"
#include "shoal/ops/moe/moe_panel.h"

namespace shoal::SHOAL_ISA {

SHOAL_INLINE Floats add_2_23(const Ints& a) { return as_floats(a | splat_int(0x4b000000u)); }

#if defined(SHOAL_ISA_AVX512)
struct FloatTable {
  float value[16];
};
constexpr FloatTable table_of_codes(int bits) {
  FloatTable table{};
  for (int i = 0; i < 16; ++i) {
    table.value[i] = static_cast<float>(i & ((1 << bits) - 1));
  }
  return table;
}
constexpr FloatTable table_of_e2m1() {
  FloatTable table{};
  for (int i = 0; i < 16; ++i) {
    table.value[i] = kE2M1Doubled[i];
  }
  return table;
}
template <int Bits>
inline constexpr FloatTable kTableOfCodes = table_of_codes(Bits);
inline constexpr FloatTable kTableOfE2M1 = table_of_e2m1();
#endif

template <int Bits>
struct AffineCodec {
  static constexpr int kBytes = 16;
  static constexpr int kWords = 4;
  static constexpr int kCodes = 32 / Bits;
#if defined(SHOAL_ISA_AVX512)
  static constexpr bool kTable = Bits <= 4;
#else
  static constexpr bool kTable = false;
#endif
  SHOAL_INLINE static Floats zeros_of(const Floats& zeros) { return kTable ? zeros : zeros + splat(0x1p23f); }
  template <int J>
  SHOAL_INLINE static Floats weight(const Ints* word, const Floats& zeros) {
#if defined(SHOAL_ISA_AVX512)
    if constexpr (kTable) {
      return look_up_floats(kTableOfCodes<Bits>.value, shift_right<J * Bits>(*word)) - zeros;
    }
#endif
    // Codes of the same place in their bytes are cut out together, once for four J.
    constexpr int kPerByte = 8 / Bits;
    const Ints codes =
        Bits == 8 ? *word : shift_right<J % kPerByte * Bits>(*word) & splat_int(((1u << Bits) - 1u) * 0x01010101u);
    return add_2_23(byte_of<J / kPerByte>(codes)) - zeros;
  }
};

// 32 codes in 12 bytes; codes 10 and 21 lie across words.
struct Affine3Codec {
  static constexpr int kBytes = 12;
  static constexpr int kWords = 1;
  static constexpr int kCodes = 32;
#if defined(SHOAL_ISA_AVX512)
  SHOAL_INLINE static Floats zeros_of(const Floats& zeros) { return zeros; }
#else
  SHOAL_INLINE static Floats zeros_of(const Floats& zeros) { return zeros + splat(0x1p23f); }
#endif
  template <int J>
  SHOAL_INLINE static Floats weight(const Ints* word, const Floats& zeros) {
    constexpr int kShift = 3 * J % 32;
    Ints code = shift_right<kShift>(word[3 * J / 32]);
    if constexpr (kShift > 29) {
      code = code | shift_left<32 - kShift>(word[3 * J / 32 + 1]);
    }
#if defined(SHOAL_ISA_AVX512)
    return look_up_floats(kTableOfCodes<3>.value, code) - zeros;
#else
    return add_2_23(code & splat_int(7)) - zeros;
#endif
  }
};

struct E2M1Codec {
  static constexpr int kBytes = 16;
  static constexpr int kWords = 4;
  static constexpr int kCodes = 8;
  SHOAL_INLINE static Floats zeros_of(const Floats&) { return splat(0x1p23f + 12.0f); }
  template <int J>
  SHOAL_INLINE static Floats weight(const Ints* word, const Floats& zeros) {
#if defined(SHOAL_ISA_AVX512)
    static_cast<void>(zeros);
    return look_up_floats(kTableOfE2M1.value, shift_right<J * 4>(*word));
#else
    static constexpr int8_t kPlus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    const Ints bytes = look_up(kPlus12, shift_right<J % 2 * 4>(*word) & splat_int(0x0f0f0f0fu));
    return add_2_23(byte_of<J / 2>(bytes)) - zeros;
#endif
  }
};

struct E4M3Codec {
  static constexpr int kBytes = 16;
  static constexpr int kWords = 4;
  static constexpr int kCodes = 4;
  SHOAL_INLINE static Floats zeros_of(const Floats& zeros) { return zeros; }
  template <int J>
  SHOAL_INLINE static Floats weight(const Ints* word, const Floats&) {
    // The bits of the magnitude as those of a float are a number 2^120 too small, subnormal ones included.
    Ints magnitude = *word;
    if constexpr (J < 3) {
      magnitude = shift_left<20 - 8 * J>(magnitude);
    } else {
      magnitude = shift_right<4>(magnitude);
    }
    magnitude = magnitude & splat_int(0x07f00000u);
    const Ints sign = shift_left<24 - 8 * J>(*word) & splat_int(0x80000000u);
    const Ints nan = where_equal(magnitude, splat_int(0x07f00000u)) & splat_int(0x7fc00000u);
    return as_floats(magnitude | sign | nan) * splat(0x1p120f);
  }
};

}  // namespace shoal::SHOAL_ISA
