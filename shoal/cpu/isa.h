// Instruction sets of the CPU path. A kernel source `<op>_cpu.cpp` is compiled once per set into a namespace of its own
// (cpu_scalar, cpu_avx2, cpu_avx512); the entry picks one at run time.
//
//   SHOAL_DECLARE_FOR_EACH_ISA(void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end))
//   ...
//   SHOAL_PICK_ISA(context.isa, rms_norm_rows)(args, begin, end);
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shoal::cpu {

enum class Isa {
  kScalar,  // plain C++, whatever the compiler's baseline is
  kAvx2,    // AVX2, FMA, F16C
  kAvx512,  // AVX-512 F, BW, DQ, VL, VNNI, BF16
};

std::string_view to_string(Isa isa);

// The sets that this processor and this build have, slowest first. Never empty.
const std::vector<Isa>& available_isas();

// The fastest available set, or the one that `SHOAL_CPU_ISA` (scalar, avx2, avx512) names.
// kInvalidArgument if the variable names an unknown set, kUnsupported if this machine or build lacks it.
Isa default_isa();

// The same for a given name. Empty means: the fastest.
Isa isa_from_name(std::string_view name);

// "AMD EPYC ...": as the processor calls itself, for doctor and results.
std::string processor_name();

}  // namespace shoal::cpu

#if defined(SHOAL_HAVE_X86_ISAS)
#define SHOAL_DECLARE_FOR_EACH_ISA(...) \
  namespace cpu_scalar {                \
  __VA_ARGS__;                          \
  }                                     \
  namespace cpu_avx2 {                  \
  __VA_ARGS__;                          \
  }                                     \
  namespace cpu_avx512 {                \
  __VA_ARGS__;                          \
  }
#define SHOAL_PICK_ISA(isa, function)                          \
  ((isa) == ::shoal::cpu::Isa::kAvx512 ? &cpu_avx512::function \
   : (isa) == ::shoal::cpu::Isa::kAvx2 ? &cpu_avx2::function   \
                                       : &cpu_scalar::function)
#else
#define SHOAL_DECLARE_FOR_EACH_ISA(...) \
  namespace cpu_scalar {                \
  __VA_ARGS__;                          \
  }
#define SHOAL_PICK_ISA(isa, function) (static_cast<void>(isa), &cpu_scalar::function)
#endif
