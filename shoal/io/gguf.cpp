#include "shoal/io/gguf.h"

#include <bit>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/text.h"

static_assert(std::endian::native == std::endian::little, "GGUF is read as it lies in memory");

namespace shoal::io {

// Which part of a split model a file is, by its name.
struct GgufFile::Part {
  int64_t idx = 0;
  int64_t count = 1;
};

namespace {

// Far above any real model (a vocabulary has 262,144 strings, a large expert model 50,000 tensors); they bound what a
// sparse file of many terabytes can make us reserve.
constexpr uint64_t kMaxTensors = uint64_t{1} << 20;
constexpr uint64_t kMaxEntries = uint64_t{1} << 16;
constexpr uint64_t kMaxArrayValues = uint64_t{1} << 24;  // all arrays of a file together
constexpr uint64_t kMaxStringBytes = uint64_t{1} << 28;  // all strings of a file together
constexpr uint64_t kMaxNameBytes = 255;
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint32_t kMaxTensorRank = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = int64_t{1} << 20;

enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// Fewest bytes of one value of a type; 0 for an unknown type.
uint64_t least_bytes(uint32_t type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kBool: return 1;
    case kUint16:
    case kInt16: return 2;
    case kUint32:
    case kInt32:
    case kFloat32: return 4;
    case kUint64:
    case kInt64:
    case kFloat64:
    case kString: return 8;
    case kArray: return 12;
    default: return 0;
  }
}

// Names of ggml types that exist but have no format here, for the message.
std::string_view ggml_type_name(uint32_t type) {
  switch (type) {
    case 9: return "q8_1";
    case 15: return "q8_k";
    case 19: return "iq1_s";
    case 24: return "i8";
    case 25: return "i16";
    case 26: return "i32";
    case 27: return "i64";
    case 28: return "f64";
    case 29: return "iq1_m";
    case 34: return "tq1_0";
    case 35: return "tq2_0";
    default: return "";
  }
}

class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  template <class... Args>
  [[noreturn]] void reject(const Args&... args) const {
    fail(ErrorCode::kModelFormat, "\"", printable(name_), "\": ", args...);
  }

  uint64_t position() const { return at_; }
  uint64_t remaining() const { return bytes_.size() - at_; }

  // `what` (and `entry`, if there is one) name what is read, for the message that the file ends inside it.
  template <class T>
  T take(std::string_view what, std::string_view entry = {}) {
    T value{};
    std::memcpy(&value, take_bytes(sizeof(T), what, entry), sizeof(T));
    return value;
  }

  std::string take_string(uint64_t max_bytes, std::string_view what, std::string_view entry = {}) {
    const auto length = take<uint64_t>(what, entry);
    if (length > remaining()) {
      reject_end(what, entry);
    }
    if (length > max_bytes) {
      reject(what, quoted(entry), " has ", length, " bytes, at most ", max_bytes, " are allowed");
    }
    string_bytes_ += length;
    if (string_bytes_ > kMaxStringBytes) {
      reject("the strings have more than ", kMaxStringBytes, " bytes");
    }
    return {reinterpret_cast<const char*>(take_bytes(length, what, entry)), length};
  }

  // The number of values of an array, checked against the bytes that are left.
  uint64_t take_array_count(uint32_t type, std::string_view key) {
    const auto count = take<uint64_t>("the array", key);
    if (count > remaining() / least_bytes(type)) {
      reject("the array", quoted(key), " claims ", count, " values, but the file has only ", remaining(),
             " more bytes");
    }
    array_values_ += count;
    if (array_values_ > kMaxArrayValues) {
      reject("the arrays have more than ", kMaxArrayValues, " values");
    }
    return count;
  }

 private:
  static std::string quoted(std::string_view entry) {
    return entry.empty() ? std::string() : concat(" \"", printable(entry), "\"");
  }

  [[noreturn]] void reject_end(std::string_view what, std::string_view entry) const {
    reject("the file ends inside ", what, quoted(entry), " (", bytes_.size(), " bytes)");
  }

  const std::byte* take_bytes(uint64_t count, std::string_view what, std::string_view entry) {
    if (count > remaining()) {
      reject_end(what, entry);
    }
    const std::byte* start = bytes_.data() + at_;
    at_ += count;
    return start;
  }

  std::span<const std::byte> bytes_;
  std::string_view name_;
  uint64_t at_ = 0;
  uint64_t string_bytes_ = 0;
  uint64_t array_values_ = 0;
};

bool take_bool(Reader& reader, std::string_view key) {
  const auto value = reader.take<uint8_t>("the value of", key);
  if (value > 1) {
    reader.reject("\"", printable(key), "\" is a boolean with the value ", static_cast<int>(value));
  }
  return value == 1;
}

// Every integer but uint64.
int64_t take_int(Reader& reader, uint32_t type, std::string_view key) {
  constexpr std::string_view kWhat = "the value of";
  switch (type) {
    case kUint8: return reader.take<uint8_t>(kWhat, key);
    case kInt8: return reader.take<int8_t>(kWhat, key);
    case kUint16: return reader.take<uint16_t>(kWhat, key);
    case kInt16: return reader.take<int16_t>(kWhat, key);
    case kUint32: return reader.take<uint32_t>(kWhat, key);
    case kInt32: return reader.take<int32_t>(kWhat, key);
    default: return reader.take<int64_t>(kWhat, key);
  }
}

double take_double(Reader& reader, uint32_t type, std::string_view key) {
  return type == kFloat32 ? static_cast<double>(reader.take<float>("the value of", key))
                          : reader.take<double>("the value of", key);
}

template <class T, class Take>
std::vector<T> take_values(uint64_t count, Take&& take) {
  std::vector<T> values;
  values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    values.push_back(take());
  }
  return values;
}

GgufValue take_array(Reader& reader, std::string_view key) {
  const auto type = reader.take<uint32_t>("the array", key);
  if (type == kArray) {
    reader.reject("\"", printable(key), "\" is an array of arrays, which is not supported");
  }
  if (least_bytes(type) == 0) {
    reader.reject("\"", printable(key), "\" is an array of the unknown value type ", type);
  }
  const uint64_t count = reader.take_array_count(type, key);
  switch (type) {
    case kBool: return take_values<bool>(count, [&] { return take_bool(reader, key); });
    case kString:
      return take_values<std::string>(count, [&] { return reader.take_string(kMaxStringBytes, "the array", key); });
    case kFloat32:
    case kFloat64: return take_values<double>(count, [&] { return take_double(reader, type, key); });
    case kUint64: {
      auto values = take_values<uint64_t>(count, [&] { return reader.take<uint64_t>("the array", key); });
      for (const uint64_t value : values) {
        if (!std::in_range<int64_t>(value)) {
          return values;
        }
      }
      return std::vector<int64_t>(values.begin(), values.end());
    }
    default: return take_values<int64_t>(count, [&] { return take_int(reader, type, key); });
  }
}

GgufValue take_value(Reader& reader, std::string_view key) {
  const auto type = reader.take<uint32_t>("the type of", key);
  switch (type) {
    case kBool: return take_bool(reader, key);
    case kString: return reader.take_string(kMaxStringBytes, "the value of", key);
    case kArray: return take_array(reader, key);
    case kFloat32:
    case kFloat64: return take_double(reader, type, key);
    case kUint64: {
      const auto value = reader.take<uint64_t>("the value of", key);
      return std::in_range<int64_t>(value) ? GgufValue(static_cast<int64_t>(value)) : GgufValue(value);
    }
    default: break;
  }
  if (least_bytes(type) == 0) {
    reader.reject("\"", printable(key), "\" has the unknown value type ", type);
  }
  return take_int(reader, type, key);
}

std::map<std::string, GgufValue, std::less<>> take_metadata(Reader& reader, uint64_t count) {
  std::map<std::string, GgufValue, std::less<>> entries;
  for (uint64_t i = 0; i < count; ++i) {
    std::string key = reader.take_string(kMaxKeyBytes, "a metadata key");
    if (key.empty()) {
      reader.reject("metadata entry ", i, " has an empty key");
    }
    if (entries.contains(key)) {
      reader.reject("metadata key \"", printable(key), "\" is there twice");
    }
    GgufValue value = take_value(reader, key);
    entries.emplace(std::move(key), std::move(value));
  }
  return entries;
}

// Everything but where the data lies: `offset` still counts from the start of the data section.
WeightTensor take_tensor(Reader& reader, size_t file_idx) {
  constexpr std::string_view kWhat = "the description of tensor";
  WeightTensor tensor;
  tensor.name = reader.take_string(kMaxNameBytes, "a tensor name");
  tensor.file_idx = file_idx;
  const std::string shown = printable(tensor.name);
  if (tensor.name.empty()) {
    reader.reject("a tensor has an empty name");
  }
  const auto rank = reader.take<uint32_t>(kWhat, tensor.name);
  if (rank > kMaxTensorRank) {
    reader.reject("tensor \"", shown, "\" has ", rank, " dimensions, at most ", kMaxTensorRank, " are allowed");
  }
  tensor.shape.resize(rank);
  for (size_t axis = rank; axis-- > 0;) {  // innermost first in the file
    const auto extent = reader.take<uint64_t>(kWhat, tensor.name);
    if (!std::in_range<int64_t>(extent)) {
      reader.reject("tensor \"", shown, "\" has a dimension of ", extent);
    }
    tensor.shape[axis] = static_cast<int64_t>(extent);
  }
  const auto type = reader.take<uint32_t>(kWhat, tensor.name);
  tensor.offset = reader.take<uint64_t>(kWhat, tensor.name);
  const auto format = format_from_ggml_type(type);
  if (!format) {
    const std::string_view type_name = ggml_type_name(type);
    fail(ErrorCode::kUnsupported, "tensor \"", shown, "\" has type ", type,
         type_name.empty() ? std::string() : concat(" (", type_name, ")"), ", which is not supported");
  }
  tensor.format = *format;
  const auto num_bytes = tensor_bytes(*format, tensor.shape);
  if (!num_bytes) {
    const int64_t k = tensor.shape.empty() ? 1 : tensor.shape.back();
    const FormatInfo& layout = info(*format);
    if (k % layout.block_size != 0) {
      reader.reject("tensor \"", shown, "\" has rows of ", k, " values, not whole blocks of ", layout.block_size, " (",
                    layout.name, ")");
    }
    reader.reject("tensor \"", shown, "\" of shape ", shape_text(tensor.shape), " does not fit the address space");
  }
  tensor.num_bytes = *num_bytes;
  return tensor;
}

uint64_t alignment_of(const std::map<std::string, GgufValue, std::less<>>& entries, const Reader& reader) {
  const auto entry = entries.find("general.alignment");
  if (entry == entries.end()) {
    return kDefaultAlignment;
  }
  const auto* value = std::get_if<int64_t>(&entry->second);
  if (value == nullptr || !is_power_of_two(*value) || *value > kMaxAlignment) {
    reader.reject("\"general.alignment\" must be a power of two up to ", kMaxAlignment,
                  value == nullptr ? std::string() : concat(", not ", *value));
  }
  return static_cast<uint64_t>(*value);
}

void check_header(Reader& reader) {
  if (reader.remaining() == 0) {
    reader.reject("the file is empty");
  }
  char magic[4] = {};
  for (char& c : magic) {
    c = reader.take<char>("the header");
  }
  if (std::string_view(magic, 4) != "GGUF") {
    reader.reject("this is neither a GGUF file nor a model folder (it starts with \"",
                  printable(std::string_view(magic, 4)), "\")");
  }
  const auto version = reader.take<uint32_t>("the header");
  if (version != 2 && version != 3) {
    const uint32_t swapped = __builtin_bswap32(version);
    reader.reject("GGUF version ", version, " is not supported, only 2 and 3 are",
                  swapped == 2 || swapped == 3 ? " (the file is big-endian)" : "");
  }
}

std::optional<int64_t> parse_digits(std::string_view text) {
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') {
      return std::nullopt;
    }
    value = value * 10 + (c - '0');
  }
  return value;
}

struct SplitName {
  std::string stem;  // "dir/name" of "dir/name-00002-of-00003.gguf"
  int64_t idx = 0;   // 1
  int64_t count = 0;
};

std::optional<SplitName> parse_split_name(const std::string& path) {
  constexpr std::string_view kPattern = "-00000-of-00000.gguf";
  if (path.size() < kPattern.size()) {
    return std::nullopt;
  }
  const size_t start = path.size() - kPattern.size();
  const std::string_view tail = std::string_view(path).substr(start);
  const auto number = parse_digits(tail.substr(1, 5));
  const auto count = parse_digits(tail.substr(10, 5));
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf" || !number || !count || *number < 1 ||
      *number > *count) {
    return std::nullopt;
  }
  return SplitName{path.substr(0, start), *number - 1, *count};
}

std::filesystem::path part_path(const SplitName& split, int64_t part_idx) {
  char tail[32];
  std::snprintf(tail, sizeof(tail), "-%05d-of-%05d.gguf", static_cast<int>(part_idx + 1),
                static_cast<int>(split.count));
  return split.stem + tail;
}

// Entries of a part that say something about that file only.
bool is_per_file(std::string_view key) { return key == "split.no" || key == "general.alignment"; }

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) {
  const auto split = parse_split_name(path.string());
  const Part whole{0, split ? split->count : 1};
  if (whole.count == 1) {
    files_.emplace_back(path);
    parse(files_[0].bytes(), path.filename().string(), 0, whole);
    return;
  }
  for (int64_t part_idx = 0; part_idx < whole.count; ++part_idx) {
    const std::filesystem::path part = part_path(*split, part_idx);
    std::error_code error;
    if (part_idx != split->idx && !std::filesystem::exists(part, error)) {
      fail(ErrorCode::kModelFormat, "\"", printable(path.filename().string()), "\" is part ", split->idx + 1, " of ",
           whole.count, ", but \"", printable(part.filename().string()), "\" is missing");
    }
    files_.emplace_back(part);
    parse(files_.back().bytes(), part.filename().string(), files_.size() - 1, {part_idx, whole.count});
  }
  const auto total = metadata_.find("split.tensors.count");
  if (total != metadata_.end() && total->second != GgufValue(static_cast<int64_t>(tensors_.size()))) {
    fail(ErrorCode::kModelFormat, "\"", printable(path.filename().string()), "\": the parts have ", tensors_.size(),
         " tensors, not as many as \"split.tensors.count\" says");
  }
}

GgufFile::GgufFile(std::span<const std::byte> bytes, std::string_view name) { parse(bytes, name, 0, {}); }

void GgufFile::parse(std::span<const std::byte> bytes, std::string_view name, size_t file_idx, const Part& part) {
  Reader reader(bytes, name);
  check_header(reader);
  const auto num_tensors = reader.take<uint64_t>("the header");
  const auto num_entries = reader.take<uint64_t>("the header");
  constexpr uint64_t kLeastTensorBytes = 8 + 1 + 4 + 4 + 8;
  constexpr uint64_t kLeastEntryBytes = 8 + 1 + 4 + 1;
  if (num_entries > kMaxEntries || num_entries > reader.remaining() / kLeastEntryBytes) {
    reader.reject("the header claims ", num_entries, " metadata entries, more than the file can hold");
  }
  if (num_tensors > kMaxTensors || num_tensors > reader.remaining() / kLeastTensorBytes) {
    reader.reject("the header claims ", num_tensors, " tensors, more than the file can hold");
  }
  auto entries = take_metadata(reader, num_entries);
  check_split(entries, name, part);
  const uint64_t alignment = alignment_of(entries, reader);
  for (auto& [key, value] : entries) {
    const auto [at, is_new] = metadata_.try_emplace(key, std::move(value));
    if (!is_new && !is_per_file(key) && at->second != value) {
      reader.reject("metadata key \"", printable(key), "\" has another value than in the parts before");
    }
  }

  std::vector<WeightTensor> found;
  found.reserve(num_tensors);
  for (uint64_t i = 0; i < num_tensors; ++i) {
    found.push_back(take_tensor(reader, file_idx));
  }
  const uint64_t data_start = round_up(reader.position(), alignment);
  for (WeightTensor& tensor : found) {
    const std::string shown = printable(tensor.name);
    if (tensor.offset % alignment != 0) {
      reader.reject("tensor \"", shown, "\" has offset ", tensor.offset, ", not a multiple of the alignment ",
                    alignment);
    }
    const auto begin = checked_add(data_start, tensor.offset);
    const auto end = begin ? checked_add(*begin, tensor.num_bytes) : std::nullopt;
    if (!end || *end > bytes.size()) {
      reader.reject("tensor \"", shown, "\" (", tensor.num_bytes, " bytes at offset ", tensor.offset,
                    ") lies outside the file of ", bytes.size(), " bytes");
    }
    tensor.offset = *begin;
    tensor.data = bytes.data() + *begin;
    std::string tensor_name = tensor.name;
    if (!tensors_.emplace(std::move(tensor_name), std::move(tensor)).second) {
      reader.reject("tensor \"", shown, "\" is there twice");
    }
  }
  reject_overlaps(tensors_, file_idx, name);
}

// A file's metadata must say the same about splitting as its name.
void GgufFile::check_split(const std::map<std::string, GgufValue, std::less<>>& entries, std::string_view name,
                           const Part& part) const {
  const auto value = [&](std::string_view key, int64_t fallback) {
    const auto entry = entries.find(key);
    if (entry == entries.end()) {
      return fallback;
    }
    const auto* number = std::get_if<int64_t>(&entry->second);
    if (number == nullptr) {
      fail(ErrorCode::kModelFormat, "\"", printable(name), "\": \"", key, "\" must be an integer");
    }
    return *number;
  };
  // Writers leave split.count away, or write 0, in a file that stands alone.
  const int64_t stated_count = value("split.count", 1);
  const int64_t count = stated_count == 0 ? 1 : stated_count;
  const int64_t idx = value("split.no", 0);
  if (count != part.count || idx != part.idx) {
    // As in names, where parts count from 1. Unsigned: the file may say anything.
    const uint64_t number = static_cast<uint64_t>(idx) + 1;
    fail(ErrorCode::kModelFormat, "\"", printable(name), "\": the metadata says that this is part ", number, " of ",
         count, ", the name says part ", part.idx + 1, " of ", part.count);
  }
}

const GgufValue* GgufFile::find_value(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

namespace {

template <class T>
const T& typed(const GgufValue* value, std::string_view key, std::string_view type_name) {
  if (value == nullptr) {
    fail(ErrorCode::kModelFormat, "metadata key \"", printable(key), "\" is missing");
  }
  const T* typed_value = std::get_if<T>(value);
  if (typed_value == nullptr) {
    fail(ErrorCode::kModelFormat, "metadata key \"", printable(key), "\" is not ", type_name);
  }
  return *typed_value;
}

}  // namespace

std::string GgufFile::get_string(std::string_view key) const {
  return typed<std::string>(find_value(key), key, "a string");
}

int64_t GgufFile::get_int(std::string_view key) const {
  return typed<int64_t>(find_value(key), key, "an integer (of 64 bits with sign)");
}

int64_t GgufFile::get_int(std::string_view key, int64_t fallback) const {
  return find_value(key) == nullptr ? fallback : get_int(key);
}

double GgufFile::get_double(std::string_view key) const {
  const GgufValue* value = find_value(key);
  if (value != nullptr && std::holds_alternative<int64_t>(*value)) {
    return static_cast<double>(std::get<int64_t>(*value));
  }
  return typed<double>(value, key, "a number");
}

double GgufFile::get_double(std::string_view key, double fallback) const {
  return find_value(key) == nullptr ? fallback : get_double(key);
}

bool GgufFile::get_bool(std::string_view key, bool fallback) const {
  const GgufValue* value = find_value(key);
  return value == nullptr ? fallback : typed<bool>(value, key, "a boolean");
}

}  // namespace shoal::io
