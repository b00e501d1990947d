// Reference of rope: channel by channel, as the contract writes it.
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/rope/rope.h"

namespace shoal {

void rope_ref(const RopeArgs& args) {
  const DType dtype = args.x.dtype;
  const int64_t head_dim = args.x.dim(2);
  const int64_t num_pairs = args.cos.dim(1);
  std::vector<float> x(static_cast<size_t>(head_dim));  // a copy: out may be x
  for (int64_t t = 0; t < args.x.dim(0); ++t) {
    const int64_t pos = args.positions.as<int32_t>()[t];
    for (int64_t head = 0; head < args.x.dim(1); ++head) {
      for (int64_t d = 0; d < head_dim; ++d) {
        x[static_cast<size_t>(d)] =
            read_element(dtype, args.x.data, t * args.x.stride(0) + head * args.x.stride(1) + d);
      }
      for (int64_t d = 0; d < head_dim; ++d) {
        float result = x[static_cast<size_t>(d)];
        const int64_t i = d - args.rotary_offset;
        if (i >= 0 && i < 2 * num_pairs) {
          const int64_t partner = args.interleaved ? i ^ 1 : (i + num_pairs) % (2 * num_pairs);
          const int64_t column = args.interleaved ? i / 2 : i % num_pairs;
          const float cos = args.cos.as<float>()[pos * args.cos.stride(0) + column];
          const float sin = args.sin.as<float>()[pos * args.sin.stride(0) + column];
          const float turned = x[static_cast<size_t>(args.rotary_offset + partner)] * sin;
          result = partner > i ? result * cos - turned : result * cos + turned;
        }
        write_element(dtype, args.out.data, t * args.out.stride(0) + head * args.out.stride(1) + d, result);
      }
    }
  }
}

}  // namespace shoal
