// safetensors files and Hugging Face model folders: config.json, one file or an index of several. Untrusted as GGUF is.
#pragma once

#include <filesystem>
#include <span>
#include <string_view>

#include "shoal/base/json.h"
#include "shoal/io/weights.h"

namespace shoal::io {

// One model folder: config.json and model.safetensors or model.safetensors.index.json with its shards (inside the
// folder: a shard name with a path separator is refused).
class ModelFolder final : public WeightSource {
 public:
  explicit ModelFolder(const std::filesystem::path& folder);

  const Json& config() const { return config_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  Json config_;
};

// The tensors of one safetensors image: for the folder reader, for fuzzing and tests. Types F32, F16, BF16 are tensors;
// others are listed by name in the error only when they are asked for (`WeightSource::get`): unknown tensors do no
// harm.
void read_safetensors(std::span<const std::byte> bytes, std::string_view name, size_t file_idx,
                      std::map<std::string, WeightTensor, std::less<>>& tensors);

}  // namespace shoal::io
