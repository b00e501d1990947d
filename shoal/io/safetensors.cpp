#include "shoal/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/text.h"

static_assert(std::endian::native == std::endian::little, "safetensors is read as it lies in memory");

namespace shoal::io {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr uint64_t kMaxConfigBytes = 16'000'000;
constexpr size_t kMaxRank = 16;

struct TypeInfo {
  std::string_view name;
  int bits;
  std::optional<Format> format;
};

constexpr TypeInfo kTypes[] = {
    {"F32", 32, Format::kF32},
    {"F16", 16, Format::kF16},
    {"BF16", 16, Format::kBF16},
    {"BOOL", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"U8", 8, {}},
    {"I8", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"I32", 32, {}},
    {"U32", 32, {}},
    {"C64", 64, {}},
    {"F64", 64, {}},
    {"I64", 64, {}},
    {"U64", 64, {}},
};

const TypeInfo* find_type(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeInfo& t) { return t.name == name; });
  return found == std::end(kTypes) ? nullptr : found;
}

// One entry of the header, checked by itself.
struct Entry {
  std::string_view name;
  const TypeInfo* type = nullptr;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // from the start of the data
  uint64_t end = 0;
};

class HeaderReader {
 public:
  HeaderReader(std::string_view file_name, uint64_t data_bytes) : file_name_(file_name), data_bytes_(data_bytes) {}

  template <class... Args>
  [[noreturn]] void reject(const Args&... args) const {
    fail(ErrorCode::kModelFormat, "\"", printable(file_name_), "\": ", args...);
  }

  Entry read_entry(std::string_view name, const Json& description) const {
    Entry entry;
    entry.name = name;
    const std::string shown = concat("tensor \"", printable(name), "\"");
    if (!description.is_object()) {
      reject(shown, " is not described by an object");
    }
    const Json& type = member(description, "dtype", Json::Kind::kString, shown);
    entry.type = find_type(type.as_string("dtype"));
    if (entry.type == nullptr) {
      reject(shown, " has the unknown type \"", printable(type.as_string("dtype")), "\"");
    }
    const Json& shape = member(description, "shape", Json::Kind::kArray, shown);
    if (shape.as_array("shape").size() > kMaxRank) {
      reject(shown, " has ", shape.as_array("shape").size(), " dimensions, at most ", kMaxRank, " are allowed");
    }
    entry.shape = integers(shape, "shape", shown);
    const auto offsets =
        integers(member(description, "data_offsets", Json::Kind::kArray, shown), "data_offsets", shown);
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      reject(shown, " must have \"data_offsets\" [begin, end], not ", shape_text(offsets));
    }
    entry.begin = static_cast<uint64_t>(offsets[0]);
    entry.end = static_cast<uint64_t>(offsets[1]);
    if (entry.end > data_bytes_) {
      reject(shown, " ends at byte ", entry.end, " of ", data_bytes_, " bytes of data");
    }
    const auto num_values = checked_product(entry.shape);
    const auto num_bits = num_values ? checked_mul<int64_t>(*num_values, entry.type->bits) : std::nullopt;
    if (!num_bits || *num_bits % 8 != 0) {
      reject(shown, " of shape ", shape_text(entry.shape), " and type ", entry.type->name,
             num_bits ? " does not fill whole bytes" : " does not fit the address space");
    }
    if (static_cast<uint64_t>(*num_bits / 8) != entry.end - entry.begin) {
      reject(shown, " of shape ", shape_text(entry.shape), " and type ", entry.type->name, " needs ", *num_bits / 8,
             " bytes, \"data_offsets\" give ", entry.end - entry.begin);
    }
    return entry;
  }

  // The tensors must cover the data, one after another.
  void check_cover(std::vector<Entry>& entries) const {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    uint64_t covered = 0;
    for (const Entry& entry : entries) {
      if (entry.begin != covered) {
        reject("tensor \"", printable(entry.name), "\" starts at byte ", entry.begin, " of the data, ",
               entry.begin < covered ? "overlapping the tensor before, which ends at byte "
                                     : "leaving a gap after the tensor before, which ends at byte ",
               covered);
      }
      covered = entry.end;
    }
    if (covered != data_bytes_) {
      reject("the tensors end at byte ", covered, " of ", data_bytes_, " bytes of data");
    }
  }

 private:
  const Json& member(const Json& description, std::string_view key, Json::Kind kind, std::string_view shown) const {
    const Json* value = description.find(key);
    if (value == nullptr) {
      reject(shown, " has no \"", key, "\"");
    }
    if (value->kind() != kind) {
      reject(shown, ": \"", key, "\" must be ", to_string(kind), ", not ", to_string(value->kind()));
    }
    return *value;
  }

  std::vector<int64_t> integers(const Json& array, std::string_view key, std::string_view shown) const {
    std::vector<int64_t> values;
    for (const Json& item : array.as_array(key)) {
      if (item.kind() != Json::Kind::kInt || item.as_int(key) < 0) {
        reject(shown, ": \"", key, "\" must hold integers from 0 to 2^63 - 1");
      }
      values.push_back(item.as_int(key));
    }
    return values;
  }

  std::string_view file_name_;
  uint64_t data_bytes_;
};

bool is_plain_file_name(std::string_view name) {
  constexpr std::string_view kSeparators("/\\\0", 3);
  return !name.empty() && name != "." && name != ".." && name.find_first_of(kSeparators) == std::string_view::npos;
}

bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

void read_safetensors(std::span<const std::byte> bytes, std::string_view name, size_t file_idx, TensorMap& tensors,
                      RawMap& raw) {
  const HeaderReader start(name, 0);
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) {
    start.reject(bytes.empty() ? "the file is empty" : "the file ends inside the length of the header");
  }
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes || header_bytes > bytes.size() - sizeof(header_bytes)) {
    start.reject("the header claims ", header_bytes, " bytes; the file has ", bytes.size(), ", at most ",
                 kMaxHeaderBytes, " are allowed");
  }
  const uint64_t data_start = sizeof(header_bytes) + header_bytes;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes), header_bytes);
  const Json header = Json::parse(text, concat("header of ", name));
  const HeaderReader reader(name, bytes.size() - data_start);
  if (!header.is_object()) {
    reader.reject("the header is not a JSON object");
  }
  std::vector<Entry> entries;
  for (const auto& [tensor_name, description] : header.as_object("header")) {
    if (tensor_name != "__metadata__") {
      entries.push_back(reader.read_entry(tensor_name, description));
    }
  }
  reader.check_cover(entries);
  for (Entry& entry : entries) {
    std::string key(entry.name);
    if (tensors.contains(key) || raw.contains(key)) {
      reader.reject("tensor \"", printable(key), "\" is in another file too");
    }
    if (!entry.type->format) {
      const uint64_t offset = data_start + entry.begin;
      raw.emplace(std::move(key), RawTensor{std::string(entry.type->name), std::move(entry.shape),
                                            bytes.data() + offset, entry.end - entry.begin, file_idx, offset});
      continue;
    }
    WeightTensor tensor;
    tensor.name = key;
    tensor.format = *entry.type->format;
    tensor.shape = std::move(entry.shape);
    tensor.num_bytes = entry.end - entry.begin;
    tensor.file_idx = file_idx;
    tensor.offset = data_start + entry.begin;
    tensor.data = bytes.data() + tensor.offset;
    tensors.emplace(std::move(key), std::move(tensor));
  }
}

ModelFolder::ModelFolder(const std::filesystem::path& folder) : path_(folder) {
  const std::string shown = printable(folder.string());
  require(is_model_folder(folder), "\"", shown, "\" is not a folder");
  if (!is_there(folder / "config.json")) {
    fail(ErrorCode::kModelFormat, "model folder \"", shown, "\" has no config.json");
  }
  config_ = Json::parse(read_text_file(folder / "config.json", kMaxConfigBytes), "config.json");
  if (!config_.is_object()) {
    fail(ErrorCode::kModelFormat, "config.json must be an object, not ", to_string(config_.kind()));
  }
  if (is_there(folder / "model.safetensors")) {
    files_.emplace_back(folder / "model.safetensors");
    read_safetensors(files_[0].bytes(), "model.safetensors", 0, tensors_, raw_);
    return;
  }
  if (!is_there(folder / "model.safetensors.index.json")) {
    fail(ErrorCode::kModelFormat, "model folder \"", shown,
         "\" has neither model.safetensors nor model.safetensors.index.json");
  }
  open_shards();
}

void ModelFolder::open_shards() {
  constexpr std::string_view kIndexName = "model.safetensors.index.json";
  const Json index = Json::parse(read_text_file(path_ / kIndexName, kMaxHeaderBytes), kIndexName);
  const Json* weight_map = index.find("weight_map");
  if (weight_map == nullptr || !weight_map->is_object()) {
    fail(ErrorCode::kModelFormat, kIndexName, " has no object \"weight_map\"");
  }
  std::map<std::string, size_t, std::less<>> shards;  // name to file_idx
  for (const auto& [tensor_name, shard] : weight_map->as_object("weight_map")) {
    if (!shard.is_string()) {
      fail(ErrorCode::kModelFormat, kIndexName, ": weight_map of \"", printable(tensor_name),
           "\" must be a string, not ", to_string(shard.kind()));
    }
    const std::string& shard_name = shard.as_string(tensor_name);
    if (shards.contains(shard_name)) {
      continue;
    }
    if (!is_plain_file_name(shard_name)) {
      fail(ErrorCode::kModelFormat, kIndexName, ": \"", printable(shard_name),
           "\" is not the name of a file in the folder");
    }
    if (!is_there(path_ / shard_name)) {
      fail(ErrorCode::kModelFormat, kIndexName, " names \"", printable(shard_name), "\", which is missing");
    }
    shards.emplace(shard_name, files_.size());
    files_.emplace_back(path_ / shard_name);
    read_safetensors(files_.back().bytes(), shard_name, files_.size() - 1, tensors_, raw_);
  }
  for (const auto& [tensor_name, shard] : weight_map->as_object("weight_map")) {
    const std::string& shard_name = shard.as_string(tensor_name);
    const size_t file_idx = shards.find(shard_name)->second;
    const auto tensor = tensors_.find(tensor_name);
    const auto other = raw_.find(tensor_name);
    const bool there = (tensor != tensors_.end() && tensor->second.file_idx == file_idx) ||
                       (other != raw_.end() && other->second.file_idx == file_idx);
    if (!there) {
      fail(ErrorCode::kModelFormat, kIndexName, " says that tensor \"", printable(tensor_name), "\" is in \"",
           printable(shard_name), "\", but it is not");
    }
  }
}

}  // namespace shoal::io
