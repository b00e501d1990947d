#include "shoal/ops/moe/moe_capture.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "shoal/base/error.h"
#include "shoal/base/text.h"

namespace shoal::moe {
namespace {

constexpr std::string_view kMagic = "QMOECAP1";
constexpr uint32_t kVersion = 1;
constexpr size_t kAlignment = 8;
constexpr size_t kLongestName = 100;  // of a file's part of the node name

uint32_t onnx_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 1;
    case DType::kI32: return 6;
    case DType::kF16: return 10;
    case DType::kBF16: return 16;
    default: break;
  }
  fail(ErrorCode::kInternal, "qmoe capture: tensor of type ", to_string(dtype));
}

class Bytes {
 public:
  template <class T>
  void number(T value) {
    raw(&value, sizeof(value));
  }
  void raw(const void* data, size_t count) {
    const auto* begin = static_cast<const char*>(data);
    bytes_.insert(bytes_.end(), begin, begin + count);
  }
  void pad() { bytes_.resize((bytes_.size() + kAlignment - 1) / kAlignment * kAlignment); }
  void set_u32(size_t place, uint32_t value) { std::memcpy(bytes_.data() + place, &value, sizeof(value)); }
  const std::vector<char>& all() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

void append_tensor(Bytes& bytes, uint32_t id, const TensorView& view) {
  bytes.number(id);
  bytes.number(onnx_type(view.dtype));
  bytes.number(static_cast<uint32_t>(view.rank));
  for (const int64_t extent : view.dims()) {
    bytes.number(static_cast<uint64_t>(extent));
  }
  bytes.number(static_cast<uint64_t>(view.num_bytes()));
  bytes.raw(view.data, view.num_bytes());
  bytes.pad();
}

std::vector<char> contents(const CaptureSample& s, const std::string& name, int invocation) {
  Bytes bytes;
  bytes.raw(kMagic.data(), kMagic.size());
  bytes.number(uint32_t{0});
  bytes.number(kVersion);
  bytes.number(onnx_type(s.input.dtype));
  bytes.number(static_cast<uint32_t>(invocation));
  bytes.number(static_cast<uint64_t>(s.num_tokens));
  for (const int64_t value :
       {s.input.dim(0), s.input.dim(1), s.fc2_input.dim(1), s.router_logits.dim(1), s.expert_ids.dim(1)}) {
    bytes.number(static_cast<uint32_t>(value));
  }
  const std::array<const TensorView*, 5> tensors = {&s.input, &s.router_logits, &s.expert_ids, &s.weights,
                                                    &s.fc2_input};
  bytes.number(static_cast<uint32_t>(tensors.size()));
  bytes.number(static_cast<uint32_t>(name.size()));
  bytes.raw(name.data(), name.size());
  bytes.pad();
  bytes.set_u32(kMagic.size(), static_cast<uint32_t>(bytes.all().size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    append_tensor(bytes, static_cast<uint32_t>(i + 1), *tensors[i]);
  }
  return bytes.all();
}

std::string file_name(const std::string& node_name, int invocation) {
  std::string name;
  for (const char c : node_name.substr(0, kLongestName)) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    name += plain ? c : '_';
  }
  return concat(name, "_", getpid(), "_", invocation < 10 ? "0" : "", invocation, ".qmoecap");
}

void write_new_file(const std::string& path, const std::vector<char>& bytes) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) {
    fail(ErrorCode::kIo, "qmoe capture: cannot create ", printable(path), ": ", std::strerror(errno));
  }
  size_t written = 0;
  int error = 0;
  while (written < bytes.size() && error == 0) {
    const ssize_t count = ::write(file, bytes.data() + written, bytes.size() - written);
    if (count >= 0) {
      written += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (close(file) != 0 && error == 0) {
    error = errno;
  }
  if (error != 0) {
    unlink(path.c_str());
    fail(ErrorCode::kIo, "qmoe capture: cannot write ", printable(path), ": ", std::strerror(error));
  }
}

}  // namespace

Capture::Capture(std::string directory, std::string node_name)
    : directory_(std::move(directory)), node_name_(std::move(node_name)) {}

bool Capture::wants(int64_t num_tokens) const {
  return !directory_.empty() && !node_name_.empty() && num_tokens >= kFewestTokens && num_written_ < kMaxInvocations;
}

std::string Capture::write(const CaptureSample& sample) {
  require(wants(sample.num_tokens), "qmoe capture: a run of ", sample.num_tokens, " tokens is not to be written");
  const int64_t rows = rows_of(sample.num_tokens);
  require(sample.input.rank == 2 && sample.input.dim(0) == rows, "qmoe capture: input has shape ",
          shape_text(sample.input.dims()), ", expected ", rows, " rows");
  const std::string path = concat(directory_, "/", file_name(node_name_, num_written_));
  write_new_file(path, contents(sample, node_name_, num_written_));
  ++num_written_;
  return path;
}

}  // namespace shoal::moe
