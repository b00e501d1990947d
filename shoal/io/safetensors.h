// safetensors files and Hugging Face model folders: config.json, one file or an index of several. Untrusted as GGUF is.
//
//   u64 length of the header (little-endian), header, data
//
// The header is a JSON object: tensor name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from
// the start of the data, and optionally "__metadata__", which is ignored. The tensors cover the data without gaps.
//
// Source: github.com/huggingface/safetensors, README "Format"
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "shoal/base/json.h"
#include "shoal/io/weights.h"

namespace shoal::io {

// One model folder: config.json and model.safetensors or, if there is none, model.safetensors.index.json with its
// shards (inside the folder: a shard name with a path separator is refused).
class ModelFolder final : public WeightSource {
 public:
  // kInvalidArgument if there is no such folder, kIo if a file cannot be read, kModelFormat for everything else.
  explicit ModelFolder(const std::filesystem::path& folder);

  const Json& config() const { return config_; }  // an object
  const std::filesystem::path& path() const { return path_; }

 private:
  void open_shards();

  std::filesystem::path path_;
  Json config_;
};

// The tensors of one safetensors image, added to `tensors` (F32, F16, BF16) and `raw` (the other types of the
// format). For the folder reader, for fuzzing and tests. `name` names the image in messages; all is kModelFormat.
void read_safetensors(std::span<const std::byte> bytes, std::string_view name, size_t file_idx, TensorMap& tensors,
                      RawMap& raw);

}  // namespace shoal::io
