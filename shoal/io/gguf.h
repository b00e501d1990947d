// GGUF v3 files, also split ones ("name-00001-of-00003.gguf"), mapped read-only.
//
// A file is untrusted: every count, offset, product, type and name is checked before it is used. Anything wrong is
// kModelFormat with one sentence naming the file and the entry.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shoal/io/weights.h"

namespace shoal::io {

// One metadata value. Integers of every width are int64 or, above its range, uint64; arrays are homogeneous.
using GgufValue = std::variant<bool, int64_t, uint64_t, double, std::string, std::vector<bool>, std::vector<int64_t>,
                               std::vector<uint64_t>, std::vector<double>, std::vector<std::string>>;

class GgufFile final : public WeightSource {
 public:
  // `path` is any part of a split model; the others are found beside it.
  explicit GgufFile(const std::filesystem::path& path);
  // A file already in memory (fuzzing, tests). `bytes` must outlive the object.
  GgufFile(std::span<const std::byte> bytes, std::string_view name);

  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const GgufValue* find_value(std::string_view key) const;

  // Typed access: kModelFormat naming the key if it is absent (no fallback given) or of another type.
  std::string get_string(std::string_view key) const;
  int64_t get_int(std::string_view key) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_double(std::string_view key) const;
  double get_double(std::string_view key, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;

 private:
  void parse(std::span<const std::byte> bytes, std::string_view name, size_t file_idx, bool first_part);
  std::map<std::string, GgufValue, std::less<>> metadata_;
};

}  // namespace shoal::io
