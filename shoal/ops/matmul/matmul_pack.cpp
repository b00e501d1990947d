// Repacking of weights into the layouts of matmul_layout.h, once at load.
#include "shoal/ops/matmul/matmul_pack.h"

#include <cstring>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"

namespace shoal {
namespace {

// [k, group] of T: value i of every row of the group side by side.
template <class T>
void pack_plain_group(const MatmulPart& part, int64_t k, int group, int64_t group_idx) {
  T* to = reinterpret_cast<T*>(part.packed.data() + group_idx * static_cast<int64_t>(part.group_bytes));
  for (int lane = 0; lane < group; ++lane) {
    const int64_t n_idx = group_idx * group + lane;
    const std::byte* from = n_idx < part.n ? part.raw.row(n_idx) : nullptr;
    for (int64_t i = 0; i < k; ++i) {
      T value{};
      if (from != nullptr) {
        std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      }
      to[i * group + lane] = value;
    }
  }
}

}  // namespace

void pack_matmul_part(MatmulPart& part, int64_t k, int group, cpu::ThreadPool& pool) {
  const size_t value_bytes = part.raw.format == Format::kF32 ? 4 : 2;
  part.group_bytes = static_cast<size_t>(k) * static_cast<size_t>(group) * value_bytes;
  part.packed = AlignedBuffer(part.group_bytes * static_cast<size_t>(part.num_groups));
  pool.parallel_for(part.num_groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      value_bytes == 4 ? pack_plain_group<uint32_t>(part, k, group, g) : pack_plain_group<uint16_t>(part, k, group, g);
    }
  });
  part.raw.codes = nullptr;
}

}  // namespace shoal
