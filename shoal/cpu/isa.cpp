#include "shoal/cpu/isa.h"

#include <cstdlib>
#include <fstream>

#include "shoal/base/error.h"
#include "shoal/base/text.h"

namespace shoal::cpu {
namespace {

std::vector<Isa> detect() {
  std::vector<Isa> isas{Isa::kScalar};
#if defined(SHOAL_HAVE_X86_ISAS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) {
    isas.push_back(Isa::kAvx2);
  }
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    isas.push_back(Isa::kAvx512);
  }
#endif
  return isas;
}

}  // namespace

std::string_view to_string(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa isa_from_name(std::string_view name) {
  if (name.empty()) {
    return available_isas().back();
  }
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (to_string(isa) != name) {
      continue;
    }
    for (const Isa available : available_isas()) {
      if (available == isa) {
        return isa;
      }
    }
    fail(ErrorCode::kUnsupported, "instruction set \"", name, "\" is not available on this machine (it has up to ",
         to_string(available_isas().back()), ")");
  }
  fail(ErrorCode::kInvalidArgument, "instruction set \"", printable(name), "\" is unknown: scalar, avx2 or avx512");
}

Isa default_isa() {
  const char* forced = std::getenv("SHOAL_CPU_ISA");
  return isa_from_name(forced == nullptr ? "" : forced);
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(':');
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos && colon + 2 <= line.size()) {
      return line.substr(colon + 2);
    }
  }
  return "unknown processor";
}

}  // namespace shoal::cpu
