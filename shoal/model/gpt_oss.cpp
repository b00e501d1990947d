// gpt_oss: layers with and without a window in turn, a learned sink a head, biases everywhere, a clamped gate, and experts
// whose gate and up rows are interleaved.
//
// The experts of a checkpoint are either MXFP4,
//   gate_up_proj_blocks u8 [experts, 2 width, hidden / 32, 16], gate_up_proj_scales u8 [experts, 2 width, hidden / 32]
// where byte i of a block holds values 2i (low nibble) and 2i + 1; or plain and transposed,
//   gate_up_proj [experts, hidden, 2 width]
// Either is rearranged at load: MXFP4 into the blocks that GGUF has for the same numbers.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"gpt-oss"};
constexpr std::array<std::string_view, 1> kHfNames{"gpt_oss"};

constexpr float kAlpha = 1.702f;
constexpr double kLimit = 7.0;

void set_gate(ExpertsConfig& experts, double limit) {
  experts.gate = Gate::kClamped;
  experts.gate_alpha = kAlpha;
  experts.gate_limit = static_cast<float>(limit);
}

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  read_gguf_experts(*file, config);
  set_gate(config.experts, kLimit);
  config.qkv_bias = true;
  config.ropes.front().truncate = false;  // no key says so; every gpt-oss has it
  const int64_t window = file->get_int("gpt-oss.attention.sliding_window");
  if (window < 1) {
    fail(ErrorCode::kModelFormat, "metadata \"gpt-oss.attention.sliding_window\" is not positive");
  }
  for (size_t i = 0; i < config.layers.size(); i += 2) {
    config.layers[i].window = window;
  }
  DecoderNames names = gguf_decoder_names();
  names.ffn_norm = "blk.{}.post_attention_norm";
  names.sinks = "blk.{}.attn_sinks.weight";
  return make_decoder(std::move(config), names, std::move(file), options, context);
}

// Bytes that the matrices of one kind, of all experts, are made in.
struct Made {
  std::shared_ptr<AlignedBuffer> bytes;
  std::vector<LoadedMatrix> matrices;

  Made(Format format, int64_t count, int64_t n, int64_t k)
      : bytes(std::make_shared<AlignedBuffer>(static_cast<size_t>(count * n * row_bytes(format, k)))) {
    for (int64_t e = 0; e < count; ++e) {
      const std::byte* codes = bytes->data() + e * n * row_bytes(format, k);
      matrices.push_back({{.format = format, .n = n, .k = k, .codes = codes}, nullptr, bytes});
    }
  }
  std::byte* row(int64_t expert_idx, int64_t n) {
    return bytes->data() + (matrices[static_cast<size_t>(expert_idx)].matrix.row(n) - bytes->data());
  }
};

// One row of MXFP4 as GGUF blocks: scale, then 16 bytes whose low nibbles are the first half.
void to_gguf_blocks(const std::byte* codes, const std::byte* scales, int64_t num_blocks, std::byte* out) {
  constexpr int kBytes = 16;
  const auto code = [](const std::byte* block, int i) { return (block[i / 2] >> (i % 2 * 4)) & std::byte{15}; };
  for (int64_t b = 0; b < num_blocks; ++b) {
    const std::byte* block = codes + b * kBytes;
    *out++ = scales[b];
    for (int i = 0; i < kBytes; ++i) {
      *out++ = code(block, i) | (code(block, i + kBytes) << 4);
    }
  }
}

// One of the two tensors of experts, [count, n, k] in either form.
class FileExperts {
 public:
  FileExperts(Loader& loader, const std::string& stem, int64_t count, int64_t n, int64_t k)
      : loader_(loader), stem_(stem), count_(count), n_(n), k_(k) {}

  // Matrices of every `step`-th of the file's n rows from `first` on.
  Made read(int64_t first, int64_t step) {
    loader_.count_parameters(count_ * (n_ / step) * k_);
    const io::WeightSource& source = loader_.source();
    const int64_t blocks_shape[] = {count_, n_, k_ / 32, 16};
    const int64_t scales_shape[] = {count_, n_, k_ / 32};
    const io::RawTensor* blocks = source.find_raw(stem_ + "_blocks", "U8", blocks_shape);
    if (blocks == nullptr) {
      return from_plain(first, step);
    }
    const io::RawTensor* scales = source.find_raw(stem_ + "_scales", "U8", scales_shape);
    if (scales == nullptr) {
      fail(ErrorCode::kModelFormat, "tensor \"", stem_, "_scales\" is missing");
    }
    if (k_ % 32 != 0) {
      fail(ErrorCode::kModelFormat, "tensor \"", stem_, "_blocks\": rows of ", k_, " values are no whole blocks of 32");
    }
    constexpr std::byte kNan{255};
    if (std::find(scales->data, scales->data + scales->num_bytes, kNan) != scales->data + scales->num_bytes) {
      fail(ErrorCode::kModelFormat, "tensor \"", stem_, "_scales\" holds a scale that is not finite");
    }
    Made made(Format::kGGUF_MXFP4, count_, n_ / step, k_);
    for (int64_t e = 0; e < count_; ++e) {
      for (int64_t row = 0; row < n_ / step; ++row) {
        const int64_t at = (e * n_ + first + row * step) * (k_ / 32);
        to_gguf_blocks(blocks->data + at * 16, scales->data + at, k_ / 32, made.row(e, row));
      }
    }
    return made;
  }

 private:
  Made from_plain(int64_t first, int64_t step) {
    const int64_t shape[] = {count_, k_, n_};
    const io::WeightTensor& tensor = loader_.source().get(stem_, shape);
    const int64_t size = row_bytes(tensor.format, 1);
    Made made(tensor.format, count_, n_ / step, k_);
    for (int64_t e = 0; e < count_; ++e) {
      for (int64_t row = 0; row < n_ / step; ++row) {
        std::byte* out = made.row(e, row);
        const std::byte* column = tensor.data + (e * k_ * n_ + first + row * step) * size;
        for (int64_t i = 0; i < k_; ++i) {
          std::memcpy(out + i * size, column + i * n_ * size, static_cast<size_t>(size));
        }
      }
    }
    return made;
  }

  Loader& loader_;
  std::string stem_;
  int64_t count_, n_, k_;
};

Tensor gates_first(const Tensor& interleaved, int64_t count, int64_t width) {
  Tensor result(DType::kF32, {count, 2 * width});
  const float* from = interleaved.span<float>().data();
  float* to = result.span<float>().data();
  for (int64_t e = 0; e < count; ++e, from += 2 * width, to += 2 * width) {
    for (int64_t i = 0; i < width; ++i) {
      to[i] = from[2 * i];
      to[width + i] = from[2 * i + 1];
    }
  }
  return result;
}

ReadExperts experts_of(const std::string& block) {
  return [=](Loader& loader, int64_t layer_idx, const ExpertsConfig& config, int64_t hidden) {
    const int64_t count = config.num_experts;
    const int64_t width = config.expert_hidden;
    const std::string stem = layer_name(block, layer_idx) + "experts.";
    FileExperts gate_up(loader, stem + "gate_up_proj", count, 2 * width, hidden);
    ExpertMatrices result;
    result.gate = gate_up.read(0, 2).matrices;
    result.up = gate_up.read(1, 2).matrices;
    result.down = FileExperts(loader, stem + "down_proj", count, hidden, width).read(0, 1).matrices;
    result.gate_up_bias = gates_first(loader.vector(stem + "gate_up_proj_bias", {count, 2 * width}), count, width);
    result.down_bias = loader.vector(stem + "down_proj_bias", {count, hidden});
    return result;
  };
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.experts =
      read_hf_experts(json, {.num_experts = "num_local_experts", .expert_hidden = "intermediate_size"}, config);
  set_gate(config.experts, hf_positive_or(json, "swiglu_limit", kLimit));
  set_expert_layers(config);
  config.qkv_bias = hf_bool_or(json, "attention_bias", true);
  read_hf_windows(json, config);
  const std::string prefix = hf_tensor_prefix(*folder);
  DecoderNames names = hf_decoder_names(prefix);
  names.sinks = prefix + "layers.{}.self_attn.sinks";
  names.experts.router = prefix + "layers.{}.mlp.router";
  names.experts.read = experts_of(prefix + "layers.{}.mlp.");
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGptOss{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
