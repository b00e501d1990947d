// Calibration capture: bytes of the file, what is counted, rights and failures.
#include "shoal/ops/moe/moe_capture.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "testkit/expect_error.h"

namespace shoal {
namespace {

using moe::Capture;
using moe::CaptureSample;

std::filesystem::path new_folder(const std::string& name) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / ("capture_" + name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

struct Data {
  explicit Data(int64_t num_tokens, int64_t h = 5, int64_t i = 3, int64_t e = 4, int64_t k = 2) {
    const int64_t rows = Capture::rows_of(num_tokens);
    sample = {num_tokens,
              TensorView(nullptr, DType::kBF16, {rows, h}),
              TensorView(nullptr, DType::kBF16, {rows, e}),
              TensorView(nullptr, DType::kI32, {rows, k}),
              TensorView(nullptr, DType::kF32, {rows, k}),
              TensorView(nullptr, DType::kBF16, {rows * k, i})};
    uint8_t next = 1;
    for (TensorView* view :
         {&sample.input, &sample.router_logits, &sample.expert_ids, &sample.weights, &sample.fc2_input}) {
      bytes.emplace_back(view->num_bytes());
      for (uint8_t& byte : bytes.back()) {
        byte = next++;
      }
    }
    size_t n = 0;
    for (TensorView* view :
         {&sample.input, &sample.router_logits, &sample.expert_ids, &sample.weights, &sample.fc2_input}) {
      view->data = bytes[n++].data();
    }
  }
  CaptureSample sample;
  std::vector<std::vector<uint8_t>> bytes;
};

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Reader {
 public:
  explicit Reader(const std::vector<char>& bytes) : bytes_(bytes) {}
  template <class T>
  T next() {
    T value{};
    EXPECT_LE(at_ + sizeof(T), bytes_.size());
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::string text(size_t count) {
    at_ += count;
    return std::string(bytes_.data() + at_ - count, count);
  }
  void align() { at_ = (at_ + 7) / 8 * 8; }
  size_t at() const { return at_; }

 private:
  const std::vector<char>& bytes_;
  size_t at_ = 0;
};

TEST(Capture, HeaderAndPayload) {
  const std::filesystem::path folder = new_folder("payload");
  Capture capture(folder.string(), "/layers.0/QMoE");
  const Data data(129);  // 128 rows of it
  ASSERT_TRUE(capture.wants(129));
  const std::string path = capture.write(data.sample);
  EXPECT_EQ(std::filesystem::path(path).filename(), concat("_layers_0_QMoE_", getpid(), "_00.qmoecap"));
  const std::vector<char> bytes = read(path);
  Reader reader(bytes);
  EXPECT_EQ(reader.text(8), "QMOECAP1");
  const uint32_t header = reader.next<uint32_t>();
  EXPECT_EQ(reader.next<uint32_t>(), 1u);
  EXPECT_EQ(reader.next<uint32_t>(), 16u);
  EXPECT_EQ(reader.next<uint32_t>(), 0u);
  EXPECT_EQ(reader.next<uint64_t>(), 129u);
  for (const uint32_t value : {128u, 5u, 3u, 4u, 2u, 5u, 14u}) {
    EXPECT_EQ(reader.next<uint32_t>(), value);
  }
  EXPECT_EQ(reader.text(14), "/layers.0/QMoE");
  reader.align();
  EXPECT_EQ(reader.at(), header);
  const std::vector<std::vector<uint64_t>> dims = {{128, 5}, {128, 4}, {128, 2}, {128, 2}, {256, 3}};
  const std::vector<uint32_t> types = {16, 16, 6, 1, 16};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(reader.next<uint32_t>(), i + 1);
    EXPECT_EQ(reader.next<uint32_t>(), types[i]);
    EXPECT_EQ(reader.next<uint32_t>(), 2u);
    EXPECT_EQ(reader.next<uint64_t>(), dims[i][0]);
    EXPECT_EQ(reader.next<uint64_t>(), dims[i][1]);
    const uint64_t size = reader.next<uint64_t>();
    ASSERT_EQ(size, data.bytes[i].size());
    const std::string payload = reader.text(size);
    EXPECT_EQ(std::vector<uint8_t>(payload.begin(), payload.end()), data.bytes[i]);
    reader.align();
  }
  EXPECT_EQ(reader.at(), bytes.size());
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST(Capture, WhatCounts) {
  const std::filesystem::path folder = new_folder("count");
  Capture capture(folder.string(), "node");
  EXPECT_FALSE(capture.wants(15));
  EXPECT_TRUE(capture.wants(16));
  EXPECT_EQ(Capture::rows_of(16), 16);
  EXPECT_EQ(Capture::rows_of(128), 128);
  EXPECT_EQ(Capture::rows_of(129), 128);
  const Data data(16);
  for (int i = 0; i < 16; ++i) {
    ASSERT_TRUE(capture.wants(16));
    capture.write(data.sample);
  }
  EXPECT_FALSE(capture.wants(16));  // the seventeenth
  testkit::expect_error(ErrorCode::kInvalidArgument, "not to be written", [&] { capture.write(data.sample); });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 16);
  EXPECT_FALSE(Capture(folder.string(), "").wants(16));  // nodes without a name
}

TEST(Capture, ExistingFileStays) {
  const std::filesystem::path folder = new_folder("existing");
  const std::filesystem::path path = folder / concat("node_", getpid(), "_00.qmoecap");
  std::ofstream(path) << "mine";
  Capture capture(folder.string(), "node");
  testkit::expect_error(ErrorCode::kIo, path.string(), [&] { capture.write(Data(16).sample); });
  const std::vector<char> bytes = read(path.string());
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "mine");
}

TEST(Capture, FailuresLeaveNothing) {
  Capture nowhere("/proc/no/such/folder", "node");
  testkit::expect_error(ErrorCode::kIo, "/proc/no/such/folder/node", [&] { nowhere.write(Data(16).sample); });

  const std::filesystem::path folder = new_folder("full");
  Capture capture(folder.string(), "node");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    capture.write(Data(16).sample);
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find(folder.string()), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

}  // namespace
}  // namespace shoal
