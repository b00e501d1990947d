#include "shoal/engine/resolve.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cuda/device.h"

namespace shoal {
namespace {

constexpr int64_t kDefaultNumSequences = 4;  // of max_context, that the cache is made for
constexpr int64_t kShareOfFreeMemory = 3;    // at most a third
constexpr int64_t kMinKeptStates = 4;        // of prefixes, whatever their size
constexpr int64_t kMaxKeptStates = 64;
constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();  // slot_mapping is i32

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, name, " must be ", low, " to ", high, ", not ", value);
}

KvType kv_type_of(const EngineOptions& options, Device device = {}) {
  const std::string& name = options.kv_dtype;
  if (name == "auto" && device.type == DeviceType::kCuda) {
    return KvType::kBF16;  // the tensor cores' own type, with the range of f32
  }
  if (name == "auto") {
    return options.exact ? KvType::kF32 : KvType::kF16;
  }
  for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kI8}) {
    if (name == to_string(type)) {
      if (device.type == DeviceType::kCuda && (type == KvType::kF32 || type == KvType::kI8)) {
        fail(ErrorCode::kUnsupported, "kv_dtype ", name, " has no CUDA path yet: use bf16 or f16");
      }
      return type;
    }
  }
  if (name == "fp8" || name == "int4") {
    fail(ErrorCode::kUnsupported, "kv_dtype ", name, ": this device has no such KV cache; use f32, f16, bf16 or int8");
  }
  fail(ErrorCode::kInvalidArgument, "kv_dtype must be auto, f32, f16, bf16 or int8, not '", printable(name), "'");
}

int64_t resolve_max_context(const EngineOptions& options, const ModelInfo& model) {
  const int64_t trained = model.max_positions > 0 ? model.max_positions : std::numeric_limits<int32_t>::max();
  require(options.max_context <= trained, "max_context ", options.max_context, " exceeds the ", trained,
          " positions of the model");
  return options.max_context > 0 ? options.max_context : std::min(trained, kDefaultMaxContext);
}

int64_t resolve_num_pages(const EngineOptions& options, int64_t max_context, int64_t page_bytes,
                          std::optional<int64_t> available_bytes) {
  const int64_t max_pages = kMaxSlots / options.page_size;
  if (options.num_pages > 0) {
    require(options.num_pages <= max_pages, "num_pages must be at most ", max_pages, " with pages of ",
            options.page_size, " tokens, not ", options.num_pages);
    return options.num_pages;
  }
  if (options.kv_bytes > 0) {
    require(options.kv_bytes >= page_bytes, "kv_bytes ", options.kv_bytes, " does not hold one page of ", page_bytes,
            " bytes");
    return std::min(max_pages, options.kv_bytes / std::max<int64_t>(page_bytes, 1));
  }
  int64_t num_pages = std::min(max_pages, kDefaultNumSequences * ceil_div(max_context, options.page_size));
  if (available_bytes && page_bytes > 0) {
    const int64_t limit = *available_bytes / kShareOfFreeMemory;
    if (limit < page_bytes) {
      fail(ErrorCode::kOutOfMemory, "a third of the free memory, ", bytes_text(static_cast<uint64_t>(limit)),
           ", does not hold one KV page of ", bytes_text(static_cast<uint64_t>(page_bytes)));
    }
    num_pages = std::min(num_pages, limit / page_bytes);
  }
  return num_pages;
}

// As much memory as for the KV pages, which they stand beside.
int64_t resolve_num_kept_states(const EngineOptions& options, const ModelInfo& model, int64_t kv_bytes) {
  if (!options.prefix_cache || model.state_layers.empty()) {
    return 0;
  }
  const int64_t slot_bytes = StatePool::bytes_per_slot(model.state_layers, 0);
  return std::clamp(kv_bytes / std::max<int64_t>(slot_bytes, 1), kMinKeptStates, kMaxKeptStates);
}

}  // namespace

std::string_view to_string(KvType type) {
  switch (type) {
    case KvType::kF32: return "f32";
    case KvType::kF16: return "f16";
    case KvType::kBF16: return "bf16";
    case KvType::kI8: return "int8";
  }
  return "unknown";
}

Device resolve_device(const EngineOptions& options) {
  const std::string& name = options.device;
  if (name == "cpu") {
    return {};
  }
  if (name == "auto") {
    const bool fits = !options.exact && options.kv_dtype != "f32" && options.kv_dtype != "int8";
    return fits && cuda::device_count() > 0 ? Device{DeviceType::kCuda, 0} : Device{};
  }
  constexpr size_t kMaxDigits = 3;
  const std::string index = name.starts_with("cuda:") ? name.substr(5) : name == "cuda" ? "0" : "";
  require(!index.empty() && index.size() <= kMaxDigits && index.find_first_not_of("0123456789") == std::string::npos,
          "device must be auto, cpu, cuda or cuda:N, not '", printable(name), "'");
  const Device device{DeviceType::kCuda, std::stoi(index)};
  const int count = cuda::device_count();
  if (device.index >= count) {
    fail(ErrorCode::kUnsupported, "device ", name, ": ",
         count == 0 ? cuda::why_no_device() : concat("there are ", count, ", numbered from 0"));
  }
  if (options.exact) {
    fail(ErrorCode::kUnsupported, "device ", name, ": exact has no CUDA path; use device cpu");
  }
  return device;
}

void check_options(const EngineOptions& options) {
  kv_type_of(options, resolve_device(options));
  check_range("max_context", options.max_context, 0, std::numeric_limits<int32_t>::max());
  check_range("max_batch_tokens", options.max_batch_tokens, 1, 1 << 20);
  check_range("max_seqs", options.max_seqs, 1, 1 << 16);
  require(is_power_of_two(options.page_size) && options.page_size >= 16 && options.page_size <= (1 << 16),
          "page_size must be a power of two from 16 to 65536, not ", options.page_size);
  check_range("num_pages", options.num_pages, 0, std::numeric_limits<int32_t>::max());
  check_range("kv_bytes", options.kv_bytes, 0, std::numeric_limits<int64_t>::max());
  check_range("threads", options.threads, 0, 1024);
}

ResolvedOptions resolve_options(const EngineOptions& options, const ModelInfo& model,
                                std::optional<int64_t> available_bytes, Device device) {
  check_options(options);
  ResolvedOptions resolved;
  resolved.kv_type = kv_type_of(options, device);
  resolved.max_context = resolve_max_context(options, model);
  const int64_t page_bytes = KvCache::bytes_per_page(model.kv_layers, resolved.kv_type, options.page_size);
  resolved.num_pages = resolve_num_pages(options, resolved.max_context, page_bytes, available_bytes);
  resolved.num_kept_states = resolve_num_kept_states(options, model, resolved.num_pages * page_bytes);
  return resolved;
}

std::optional<int64_t> available_memory_bytes(Device device) {
  if (device.type == DeviceType::kCuda) {
    return cuda::device_info(device.index).free_bytes;
  }
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::string unit;
  int64_t kibibytes = 0;
  while (file >> name >> kibibytes) {
    std::getline(file, unit);
    if (name == "MemAvailable:") {
      return kibibytes * 1024;
    }
  }
  return std::nullopt;
}

}  // namespace shoal
