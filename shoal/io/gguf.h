// GGUF files of version 2 and 3 (little-endian), also split ones ("name-00001-of-00003.gguf"), mapped read-only.
//
//   header    "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries
//   metadata  each: string key, u32 type (0..12), value; a string is u64 length and bytes, an array u32 type, u64 count
//   tensors   each: string name, u32 rank (0..4), u64 dimensions innermost first, u32 ggml type, u64 offset
//   data      from the next multiple of general.alignment (default 32); offsets count from here
//
// A file is untrusted: every count, offset, product, type and name is checked before it is used; what is reserved is
// bounded by the bytes that are there. Anything wrong is kModelFormat with one sentence naming the file and the entry;
// a tensor type without a format in quant/formats.def is kUnsupported.
//
// Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shoal/io/weights.h"

namespace shoal::io {

// One metadata value. Integers of every width are int64 or, above its range, uint64; both floats are double; arrays are
// homogeneous (an array of uint64 is vector<int64_t> if all its values fit). Strings are bytes, not checked to be
// UTF-8.
using GgufValue = std::variant<bool, int64_t, uint64_t, double, std::string, std::vector<bool>, std::vector<int64_t>,
                               std::vector<uint64_t>, std::vector<double>, std::vector<std::string>>;

class GgufFile final : public WeightSource {
 public:
  // `path` is any part of a split model; the others are found beside it, all are opened. kInvalidArgument if there is
  // no such file, kIo if it cannot be mapped.
  explicit GgufFile(const std::filesystem::path& path);
  // A file already in memory (fuzzing, tests). `bytes` must outlive the object. One part of a split model is refused.
  GgufFile(std::span<const std::byte> bytes, std::string_view name);

  // Of a split model: the entries of all parts together; parts must not disagree.
  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const GgufValue* find_value(std::string_view key) const;  // nullptr if absent

  // Typed access: kModelFormat naming the key if it is absent (no fallback given) or of another type. An integer is
  // accepted as a double.
  std::string get_string(std::string_view key) const;
  int64_t get_int(std::string_view key) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_double(std::string_view key) const;
  double get_double(std::string_view key, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;

 private:
  struct Part;
  void parse(std::span<const std::byte> bytes, std::string_view name, size_t file_idx, const Part& part);
  void check_split(const std::map<std::string, GgufValue, std::less<>>& entries, std::string_view name,
                   const Part& part) const;

  std::map<std::string, GgufValue, std::less<>> metadata_;
};

}  // namespace shoal::io
