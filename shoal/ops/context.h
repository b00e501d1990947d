// What an operator needs besides its arguments: where to run, with what scratch memory, on which variant.
#pragma once

#include <string_view>

#include "shoal/cpu/isa.h"
#include "shoal/tensor/stream.h"
#include "shoal/tensor/workspace.h"

namespace shoal {

namespace cpu {
class ThreadPool;
}

struct OpContext {
  cpu::ThreadPool* pool = nullptr;  // never null for CPU operators
  Workspace* workspace = nullptr;   // needed by operators that say so in their contract
  cpu::Isa isa = cpu::Isa::kScalar;
  // Empty: the best variant. "ref": the reference. Otherwise a variant's name; an unknown one is kInvalidArgument and
  // lists the known ones.
  std::string_view variant{};
  // Where weights are prepared and CUDA operators run; the workspace is memory of the same device.
  Device device{};
  Stream stream{};
};

}  // namespace shoal
