#include "shoal/io/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/float_bits.h"
#include "shoal/base/text.h"
#include "shoal/io/hf_config.h"

namespace shoal::io {
namespace {

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int64_t kMaxGroup = 1 << 24;
constexpr int64_t kQBlock = 32;  // values of a q4_0, q4_1 or q8_0 block

template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  fail(ErrorCode::kUnsupported, "config.json: quantization_config: ", parts..., " is not supported");
}

// Whole groups of at least 16 inputs; -1 stands for whole rows.
int64_t checked_group(int64_t group_size) {
  if (group_size == -1 || group_size == 0) {
    return 0;
  }
  if (group_size < 16) {
    unsupported("a group of ", group_size, " values");
  }
  return group_size;
}

// Integer codes of a matrix with scales and zeros for groups of inputs. As large as the file's codes: made once they are
// known to be there.
struct Affine {
  int bits;
  int64_t n, k, group_size, groups;
  std::vector<uint8_t> codes;     // [n, k]
  std::vector<float> scales;      // [n, groups]
  std::vector<uint8_t> zeros;     // [n, groups]
  std::vector<int32_t> group_of;  // [k], or empty: in order

  Affine(int bits, int64_t n, int64_t k, int64_t group_size)
      : bits(bits),
        n(n),
        k(k),
        group_size(group_size == 0 ? k : group_size),
        groups(ceil_div(k, this->group_size)),
        codes(static_cast<size_t>(n * k)),
        zeros(static_cast<size_t>(n * groups), static_cast<uint8_t>(1 << (bits - 1))) {}

  size_t at(int64_t n_idx, int64_t group) const { return static_cast<size_t>(n_idx * groups + group); }
  uint8_t code(int64_t n_idx, int64_t k_idx) const { return codes[static_cast<size_t>(n_idx * k + k_idx)]; }
};

// Reads the tensors of one layer.
class Layer {
 public:
  Layer(const WeightSource& source, const std::string& stem) : source_(source), stem_(stem) {}

  std::string name(std::string_view suffix) const { return concat(stem_, ".", suffix); }

  const RawTensor* find(std::string_view suffix, std::string_view type, std::initializer_list<int64_t> shape) const {
    return source_.find_raw(name(suffix), type, std::span(shape.begin(), shape.size()));
  }

  const RawTensor& get(std::string_view suffix, std::string_view type, std::initializer_list<int64_t> shape) const {
    const RawTensor* tensor = find(suffix, type, shape);
    if (tensor == nullptr) {
      fail(ErrorCode::kModelFormat, "tensor \"", printable(name(suffix)), "\" is missing");
    }
    return *tensor;
  }

  // Float scales of one of the shapes, finite.
  std::vector<float> scales(std::string_view suffix, std::span<const std::vector<int64_t>> shapes) const {
    const WeightTensor* tensor = source_.find(name(suffix));
    const bool fits = tensor != nullptr && std::find(shapes.begin(), shapes.end(), tensor->shape) != shapes.end();
    const WeightTensor& checked = fits ? *tensor : source_.get(name(suffix), shapes.front());
    std::vector<float> values(static_cast<size_t>(checked.num_values()));
    decode_row(checked.format, checked.data, static_cast<int64_t>(values.size()), values.data());
    for (const float value : values) {
      if (!std::isfinite(value)) {
        fail(ErrorCode::kModelFormat, "tensor \"", printable(name(suffix)), "\" holds a scale that is not finite");
      }
    }
    return values;
  }
  std::vector<float> scales(std::string_view suffix, const std::vector<int64_t>& shape) const {
    return scales(suffix, std::span(&shape, 1));
  }

 private:
  const WeightSource& source_;
  const std::string& stem_;
};

uint32_t word(const RawTensor& tensor, int64_t idx) {
  uint32_t value = 0;
  std::memcpy(&value, tensor.data + idx * 4, 4);
  return value;
}

void require_whole(int64_t size, int64_t per, const Layer& layer, std::string_view suffix) {
  if (size % per != 0) {
    fail(ErrorCode::kModelFormat, "tensor \"", printable(layer.name(suffix)), "\": ", size,
         " values are no whole number of ", per);
  }
}

// g_idx that is in order is no g_idx.
void read_group_of(const Layer& layer, std::string_view suffix, Affine& affine) {
  const RawTensor* tensor = layer.find(suffix, "I32", {affine.k});
  if (tensor == nullptr) {
    return;
  }
  bool in_order = true;
  std::vector<int32_t> group_of(static_cast<size_t>(affine.k));
  for (int64_t i = 0; i < affine.k; ++i) {
    const auto group = static_cast<int32_t>(word(*tensor, i));
    if (group < 0 || group >= affine.groups) {
      fail(ErrorCode::kModelFormat, "tensor \"", printable(layer.name(suffix)), "\" has group ", group, " of ",
           affine.groups);
    }
    group_of[static_cast<size_t>(i)] = group;
    in_order = in_order && group == i / affine.group_size;
  }
  if (!in_order) {
    affine.group_of = std::move(group_of);
  }
}

// [groups, n] of the file as [n, groups].
std::vector<float> transposed(const std::vector<float>& values, int64_t groups, int64_t n) {
  std::vector<float> result(values.size());
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < n; ++i) {
      result[static_cast<size_t>(i * groups + g)] = values[static_cast<size_t>(g * n + i)];
    }
  }
  return result;
}

Affine read_gptq_layer(const Layer& layer, int bits, int64_t group_size, bool less_one, int64_t n, int64_t k) {
  const int64_t per_word = 32 / bits;
  const uint32_t mask = (1u << bits) - 1;
  require_whole(k, per_word, layer, "qweight");
  require_whole(n, per_word, layer, "qzeros");
  const RawTensor& codes = layer.get("qweight", "I32", {k / per_word, n});
  Affine affine(bits, n, k, group_size);
  for (int64_t row = 0; row < k / per_word; ++row) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t packed = word(codes, row * n + i);
      for (int64_t j = 0; j < per_word; ++j) {
        affine.codes[static_cast<size_t>(i * k + row * per_word + j)] =
            static_cast<uint8_t>(packed >> (j * bits) & mask);
      }
    }
  }
  const RawTensor& zeros = layer.get("qzeros", "I32", {affine.groups, n / per_word});
  for (int64_t g = 0; g < affine.groups; ++g) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t zero = word(zeros, g * (n / per_word) + i / per_word) >> (i % per_word * bits);
      affine.zeros[affine.at(i, g)] = static_cast<uint8_t>((zero + (less_one ? 1 : 0)) & mask);
    }
  }
  affine.scales = transposed(layer.scales("scales", {affine.groups, n}), affine.groups, n);
  read_group_of(layer, "g_idx", affine);
  return affine;
}

Affine read_awq_layer(const Layer& layer, int64_t group_size, int64_t n, int64_t k) {
  require_whole(n, 8, layer, "qweight");
  const auto nibble = [&](const RawTensor& tensor, int64_t row, int64_t column, int i) {
    return static_cast<uint8_t>(word(tensor, row * (n / 8) + column) >> (4 * i) & 15);
  };
  const RawTensor& codes = layer.get("qweight", "I32", {k, n / 8});
  Affine affine(4, n, k, group_size);
  const RawTensor& zeros = layer.get("qzeros", "I32", {affine.groups, n / 8});
  for (int64_t column = 0; column < n / 8; ++column) {
    for (int i = 0; i < 8; ++i) {
      const int64_t n_idx = column * 8 + kAwqOrder[i];
      for (int64_t row = 0; row < k; ++row) {
        affine.codes[static_cast<size_t>(n_idx * k + row)] = nibble(codes, row, column, i);
      }
      for (int64_t g = 0; g < affine.groups; ++g) {
        affine.zeros[affine.at(n_idx, g)] = nibble(zeros, g, column, i);
      }
    }
  }
  affine.scales = transposed(layer.scales("scales", {affine.groups, n}), affine.groups, n);
  return affine;
}

Affine read_packed_layer(const Layer& layer, int bits, int64_t group_size, int64_t n, int64_t k) {
  const int64_t per_word = 32 / bits;
  const uint32_t mask = (1u << bits) - 1;
  const int64_t words = ceil_div(k, per_word);
  const RawTensor& codes = layer.get("weight_packed", "I32", {n, words});
  Affine affine(bits, n, k, group_size);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      affine.codes[static_cast<size_t>(i * k + j)] =
          static_cast<uint8_t>(word(codes, i * words + j / per_word) >> (j % per_word * bits) & mask);
    }
  }
  if (const RawTensor* zeros = layer.find("weight_zero_point", "I32", {ceil_div(n, per_word), affine.groups})) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t g = 0; g < affine.groups; ++g) {
        affine.zeros[affine.at(i, g)] =
            static_cast<uint8_t>(word(*zeros, i / per_word * affine.groups + g) >> (i % per_word * bits) & mask);
      }
    }
  }
  affine.scales = layer.scales("weight_scale", {n, affine.groups});
  read_group_of(layer, "weight_g_idx", affine);
  return affine;
}

Affine read_int8_layer(const Layer& layer, int64_t group_size, int64_t n, int64_t k) {
  const RawTensor& codes = layer.get("weight", "I8", {n, k});
  Affine affine(8, n, k, group_size);
  for (size_t i = 0; i < affine.codes.size(); ++i) {
    affine.codes[i] = static_cast<uint8_t>(static_cast<uint8_t>(codes.data[i]) ^ 0x80);  // plus 128
  }
  const std::vector<int64_t> shapes[] = {{n, affine.groups}, {1}, {}};
  affine.scales = layer.scales("weight_scale", std::span(shapes, group_size == 0 ? 3 : 1));
  if (affine.scales.size() == 1) {
    affine.scales.resize(static_cast<size_t>(n * affine.groups), affine.scales.front());
  }
  return affine;
}

// Bytes and scales of a matrix, kept together.
struct Storage {
  AlignedBuffer codes;
  Tensor scales, zeros, global_scale;
};

Tensor to_tensor(const std::vector<float>& values, std::initializer_list<int64_t> shape) {
  Tensor tensor(DType::kF32, shape);
  std::copy(values.begin(), values.end(), tensor.span<float>().data());
  return tensor;
}

OwnedMatrix owned(Format format, int64_t n, int64_t k, int64_t group_size, std::shared_ptr<Storage> storage) {
  OwnedMatrix result;
  result.matrix = {.format = format, .n = n, .k = k, .codes = storage->codes.data(), .group_size = group_size};
  result.matrix.scales = storage->scales;
  result.matrix.zeros = storage->zeros;
  result.matrix.global_scale = storage->global_scale;
  result.owner = std::move(storage);
  return result;
}

bool is_f16(float value) { return f16_to_f32(f32_to_f16(value)) == value; }

// The GGUF block format that holds the affine's values, if there is one.
std::optional<Format> block_format(const Affine& a, bool exact) {
  const bool in_blocks = a.k % kQBlock == 0 && a.group_size % kQBlock == 0;
  if (!in_blocks || !std::all_of(a.scales.begin(), a.scales.end(), is_f16)) {
    return std::nullopt;
  }
  const auto middle = static_cast<uint8_t>(1 << (a.bits - 1));
  const bool is_symmetric = std::all_of(a.zeros.begin(), a.zeros.end(), [&](uint8_t zero) { return zero == middle; });
  if (a.bits == 4 && (is_symmetric || !exact)) {
    return is_symmetric ? Format::kQ4_0 : Format::kQ4_1;
  }
  return a.bits == 8 && is_symmetric ? std::optional(Format::kQ8_0) : std::nullopt;
}

// One block of 32: the scale, for q4_1 the offset, the codes.
std::byte* write_block(const Affine& a, Format format, int64_t n_idx, int64_t k_begin, std::byte* out) {
  const size_t at = a.at(n_idx, k_begin / a.group_size);
  const auto put = [&](float value) {
    const uint16_t bits = f32_to_f16(value);
    std::memcpy(out, &bits, 2);
    out += 2;
  };
  put(a.scales[at]);
  if (format == Format::kQ4_1) {
    put(-static_cast<float>(a.zeros[at]) * a.scales[at]);
  }
  if (format == Format::kQ8_0) {
    for (int64_t i = 0; i < kQBlock; ++i) {
      *out++ = static_cast<std::byte>(a.code(n_idx, k_begin + i) ^ 0x80);
    }
    return out;
  }
  for (int64_t i = 0; i < kQBlock / 2; ++i) {
    *out++ = static_cast<std::byte>(a.code(n_idx, k_begin + i) | a.code(n_idx, k_begin + i + kQBlock / 2) << 4);
  }
  return out;
}

OwnedMatrix to_blocks(const Affine& a, Format format) {
  auto storage = std::make_shared<Storage>();
  storage->codes = AlignedBuffer(static_cast<size_t>(a.n * row_bytes(format, a.k)));
  std::byte* out = storage->codes.data();
  for (int64_t n_idx = 0; n_idx < a.n; ++n_idx) {
    for (int64_t k_begin = 0; k_begin < a.k; k_begin += kQBlock) {
      out = write_block(a, format, n_idx, k_begin, out);
    }
  }
  return owned(format, a.n, a.k, 0, std::move(storage));
}

// Codes of `width` a row as an LSB-first stream, rows padded to bytes.
void pack_codes(const uint8_t* codes, int64_t n, int64_t width, int bits, std::byte* out) {
  const int64_t row = ceil_div<int64_t>(width * bits, 8);
  std::memset(out, 0, static_cast<size_t>(n * row));
  for (int64_t n_idx = 0; n_idx < n; ++n_idx) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t bit = i * bits;  // 2, 4 and 8 bits never cross a byte
      out[n_idx * row + bit / 8] |= static_cast<std::byte>(codes[n_idx * width + i] << (bit % 8));
    }
  }
}

OwnedMatrix to_codes(const Affine& a) {
  const Format format = a.bits == 2 ? Format::kINT2 : a.bits == 4 ? Format::kINT4 : Format::kINT8;
  auto storage = std::make_shared<Storage>();
  storage->codes = AlignedBuffer(static_cast<size_t>(a.n * row_bytes(format, a.k)));
  pack_codes(a.codes.data(), a.n, a.k, a.bits, storage->codes.data());
  storage->scales = to_tensor(a.scales, {a.n, a.groups});
  storage->zeros = Tensor(DType::kU8, {a.n, ceil_div<int64_t>(a.groups * a.bits, 8)});
  pack_codes(a.zeros.data(), a.n, a.groups, a.bits, static_cast<std::byte*>(storage->zeros.view().data));
  return owned(format, a.n, a.k, a.group_size, std::move(storage));
}

OwnedMatrix to_f32(const Affine& a) {
  auto storage = std::make_shared<Storage>();
  storage->codes = AlignedBuffer(static_cast<size_t>(a.n * a.k) * sizeof(float));
  auto* out = reinterpret_cast<float*>(storage->codes.data());
  for (int64_t n_idx = 0; n_idx < a.n; ++n_idx) {
    for (int64_t i = 0; i < a.k; ++i) {
      const size_t at = a.at(n_idx, a.group_of[static_cast<size_t>(i)]);
      *out++ = static_cast<float>(a.code(n_idx, i) - a.zeros[at]) * a.scales[at];
    }
  }
  return owned(Format::kF32, a.n, a.k, 0, std::move(storage));
}

OwnedMatrix to_matrix(const Affine& affine, bool exact) {
  if (!affine.group_of.empty()) {
    return to_f32(affine);
  }
  const std::optional<Format> blocks = block_format(affine, exact);
  return blocks ? to_blocks(affine, *blocks) : to_codes(affine);
}

OwnedMatrix read_fp8_layer(const Layer& layer, const char* scale_name, int64_t block, int64_t n, int64_t k) {
  auto storage = std::make_shared<Storage>();
  const RawTensor& codes = layer.get("weight", "F8_E4M3", {n, k});
  std::vector<std::vector<int64_t>> shapes = {{n, 1}, {1}, {}};
  if (block > 0) {
    shapes = {{ceil_div(n, block), ceil_div(k, block)}};
  }
  const std::vector<float> scales = layer.scales(scale_name, shapes);
  storage->scales = to_tensor(scales, {static_cast<int64_t>(scales.size())});
  OwnedMatrix result = owned(Format::kFP8_E4M3, n, k, block, std::move(storage));
  result.matrix.codes = codes.data;
  return result;
}

OwnedMatrix read_nvfp4_layer(const Layer& layer, bool divides, int64_t n, int64_t k) {
  require_whole(k, 16, layer, divides ? "weight_packed" : "weight");
  const RawTensor& codes = layer.get(divides ? "weight_packed" : "weight", "U8", {n, k / 2});
  const RawTensor& scales = layer.get("weight_scale", "F8_E4M3", {n, k / 16});
  const std::vector<int64_t> shapes[] = {{1}, {}};
  const float global = layer.scales(divides ? "weight_global_scale" : "weight_scale_2", shapes).front();
  const float factor = divides ? 1.0f / global : global;
  const bool has_nan = std::any_of(scales.data, scales.data + scales.num_bytes,
                                   [](std::byte scale) { return (scale & std::byte{0x7f}) == std::byte{0x7f}; });
  if (has_nan || !std::isfinite(factor)) {
    const std::string_view suffix = has_nan ? "weight_scale" : "weight_global_scale";
    fail(ErrorCode::kModelFormat, "tensor \"", printable(layer.name(suffix)), "\" holds a scale that is not finite");
  }
  auto storage = std::make_shared<Storage>();
  storage->global_scale = to_tensor({factor}, {1});
  storage->scales = Tensor(DType::kF8E4M3, {n, k / 16});
  std::memcpy(storage->scales.view().data, scales.data, scales.num_bytes);
  OwnedMatrix result = owned(Format::kNVFP4, n, k, 16, std::move(storage));
  result.matrix.codes = codes.data;
  return result;
}

}  // namespace

CheckpointScheme::CheckpointScheme(const Json& config) {
  const Json* quant = config.find("quantization_config");
  if (quant == nullptr || quant->is_null()) {
    return;
  }
  if (!quant->is_object()) {
    fail(ErrorCode::kModelFormat, "config.json: \"quantization_config\" must be an object");
  }
  const std::string method = hf_string_or(*quant, "quant_method", "unknown");
  if (method == "gptq") {
    read_gptq(*quant);
  } else if (method == "awq") {
    read_awq(*quant);
  } else if (method == "fp8") {
    kind_ = Kind::kFp8;
    bits_ = 8;
    scale_name_ = "weight_scale_inv";
    scale_block_ = 128;
    const Json* block = quant->find("weight_block_size");
    if (block == nullptr || !block->is_array() || block->as_array("").size() != 2 ||
        block->as_array("")[0].as_int("weight_block_size") != 128 ||
        block->as_array("")[1].as_int("weight_block_size") != 128) {
      unsupported("fp8 without a weight_block_size of [128, 128]");
    }
  } else if (method == "compressed-tensors") {
    read_compressed(*quant);
  } else if (method == "modelopt") {
    read_modelopt(*quant);
  } else if (method == "mxfp4") {
    bits_ = 4;
  } else {
    fail(ErrorCode::kUnsupported, "config.json: quantised checkpoints of method \"", printable(method),
         "\" are not supported (gptq, awq, fp8, compressed-tensors, modelopt, mxfp4)");
  }
}

void CheckpointScheme::read_gptq(const Json& config) {
  kind_ = Kind::kGptq;
  bits_ = static_cast<int>(hf_int_or(config, "bits", 4, 1, 64));
  group_size_ = checked_group(hf_int_or(config, "group_size", 128, -1, kMaxGroup));
  if (bits_ != 2 && bits_ != 4 && bits_ != 8) {
    unsupported("gptq with ", bits_, " bits");
  }
  const std::string format = hf_string_or(config, "checkpoint_format", "gptq");
  if (format != "gptq" && format != "gptq_v2") {
    unsupported("gptq checkpoint_format \"", printable(format), "\"");
  }
  zeros_less_one_ = format == "gptq";
}

void CheckpointScheme::read_awq(const Json& config) {
  kind_ = Kind::kAwq;
  bits_ = static_cast<int>(hf_int_or(config, "bits", 4, 1, 64));
  group_size_ = checked_group(hf_int_or(config, "group_size", 128, -1, kMaxGroup));
  const std::string version = hf_string_or(config, "version", "gemm");
  if (bits_ != 4 || (version != "gemm" && version != "GEMM")) {
    unsupported("awq version \"", printable(version), "\" with ", bits_, " bits");
  }
}

void CheckpointScheme::read_compressed(const Json& config) {
  const std::string format = hf_string_or(config, "format", "");
  const Json* groups = config.find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->as_object("config_groups").size() != 1) {
    unsupported("compressed-tensors without exactly one entry in config_groups");
  }
  const Json* weights = groups->as_object("config_groups").begin()->second.find("weights");
  if (weights == nullptr || !weights->is_object()) {
    unsupported("compressed-tensors without \"weights\" in config_groups");
  }
  bits_ = static_cast<int>(hf_int_or(*weights, "num_bits", 0, 1, 64));
  group_size_ = checked_group(hf_int_or(*weights, "group_size", 0, -1, kMaxGroup));
  const std::string strategy = hf_string_or(*weights, "strategy", "");
  if (format == "pack-quantized" && (bits_ == 4 || bits_ == 8)) {
    kind_ = Kind::kPacked;
  } else if ((format == "int-quantized" || format == "naive-quantized") && bits_ == 8 &&
             hf_string_or(*weights, "type", "int") == "int" && hf_bool_or(*weights, "symmetric", true)) {
    kind_ = Kind::kInt8;
  } else if ((format == "float-quantized" || format == "naive-quantized") && bits_ == 8) {
    kind_ = Kind::kFp8;
    scale_name_ = "weight_scale";
    scale_block_ = strategy == "block" ? 128 : 0;
  } else if (format == "nvfp4-pack-quantized") {
    kind_ = Kind::kNvfp4Divisor;
  } else {
    unsupported("compressed-tensors format \"", printable(format), "\" with ", bits_, " bits");
  }
}

void CheckpointScheme::read_modelopt(const Json& config) {
  const std::string algorithm = hf_string_or(config, "quant_algo", "");
  if (algorithm == "NVFP4") {
    kind_ = Kind::kNvfp4;
    bits_ = 4;
  } else if (algorithm == "FP8") {
    kind_ = Kind::kFp8;
    bits_ = 8;
    scale_name_ = "weight_scale";
  } else {
    unsupported("modelopt algorithm \"", printable(algorithm), "\"");
  }
}

// The tensor that every covered layer has.
const char* CheckpointScheme::marker() const {
  switch (kind_) {
    case Kind::kGptq:
    case Kind::kAwq: return "qweight";
    case Kind::kPacked:
    case Kind::kNvfp4Divisor: return "weight_packed";
    default: return "weight";
  }
}

bool CheckpointScheme::covers(const WeightSource& source, const std::string& stem) const {
  return kind_ != Kind::kNone && source.has_raw(concat(stem, ".", marker()));
}

OwnedMatrix CheckpointScheme::read(const WeightSource& source, const std::string& stem, int64_t n, int64_t k,
                                   bool exact) const {
  const Layer layer(source, stem);
  if (group_size_ > 0 && (kind_ == Kind::kGptq || kind_ == Kind::kAwq || kind_ == Kind::kPacked)) {
    require_whole(k, group_size_, layer, marker());
  }
  switch (kind_) {
    case Kind::kGptq: return to_matrix(read_gptq_layer(layer, bits_, group_size_, zeros_less_one_, n, k), exact);
    case Kind::kAwq: return to_matrix(read_awq_layer(layer, group_size_, n, k), exact);
    case Kind::kPacked: return to_matrix(read_packed_layer(layer, bits_, group_size_, n, k), exact);
    case Kind::kInt8: return to_matrix(read_int8_layer(layer, group_size_, n, k), exact);
    case Kind::kFp8: return read_fp8_layer(layer, scale_name_, scale_block_, n, k);
    case Kind::kNvfp4Divisor: return read_nvfp4_layer(layer, true, n, k);
    case Kind::kNvfp4: return read_nvfp4_layer(layer, false, n, k);
    case Kind::kNone: break;
  }
  fail(ErrorCode::kInternal, "checkpoint: layer \"", printable(stem), "\" is not quantised");
}

}  // namespace shoal::io
