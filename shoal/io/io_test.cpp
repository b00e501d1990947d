// Weights as such, safetensors images and model folders; GGUF has a test of its own.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "shoal/base/error.h"
#include "shoal/io/safetensors.h"
#include "shoal/io/weights.h"
#include "testkit/expect_error.h"

namespace shoal::io {
namespace {

using testkit::expect_error;
using Shape = std::vector<int64_t>;

constexpr int64_t kBig = int64_t{1} << 40;

template <class Body>
void expect_malformed(std::string_view message, Body&& body) {
  SCOPED_TRACE(message);
  expect_error(ErrorCode::kModelFormat, message, body);
}

// A safetensors image: the header's length, the header, that many bytes of data (0, 1, 2, ...).
std::string image(std::string_view header, size_t data_bytes) {
  const uint64_t header_bytes = header.size();
  std::string text(sizeof(header_bytes), '\0');
  std::memcpy(text.data(), &header_bytes, sizeof(header_bytes));
  text += header;
  for (size_t i = 0; i < data_bytes; ++i) {
    text += static_cast<char>(i);
  }
  return text;
}

std::string entry(std::string_view name, std::string_view type, std::string_view shape, int64_t begin, int64_t end) {
  return concat("\"", name, "\":{\"dtype\":\"", type, "\",\"shape\":", shape, ",\"data_offsets\":[", begin, ",", end,
                "]}");
}

struct Tensors {
  TensorMap tensors;
  RawMap raw;
};

Tensors read(std::string_view bytes) {
  Tensors result;
  read_safetensors(std::as_bytes(std::span(bytes)), "x.safetensors", 0, result.tensors, result.raw);
  return result;
}

void expect_rejected(std::string_view header, size_t data_bytes, std::string_view message) {
  const std::string text = image(header, data_bytes);
  expect_malformed(message, [&] { read(text); });
}

// One tensor in 16 bytes of data.
void expect_entry_rejected(std::string_view one_entry, std::string_view message) {
  expect_rejected(concat("{", one_entry, "}"), 16, message);
}

TEST(Weights, ProductsAndBytes) {
  EXPECT_EQ(checked_product(Shape{}), 1);
  EXPECT_EQ(checked_product(Shape{2, 3, 4}), 24);
  EXPECT_EQ(checked_product(Shape{2, 0, 4}), 0);
  EXPECT_EQ(checked_product(Shape{kBig, kBig}), std::nullopt);
  EXPECT_EQ(checked_product(Shape{0, kBig, kBig}), std::nullopt);  // strides would overflow
  EXPECT_EQ(tensor_bytes(Format::kF32, Shape{}), 4u);
  EXPECT_EQ(tensor_bytes(Format::kBF16, Shape{3, 5}), 30u);
  EXPECT_EQ(tensor_bytes(Format::kQ4_0, Shape{3, 64}), 3u * 2 * 18);
  EXPECT_EQ(tensor_bytes(Format::kQ4_K, Shape{2, 512}), 2u * 2 * 144);
  EXPECT_EQ(tensor_bytes(Format::kQ4_0, Shape{64, 3}), std::nullopt);
  EXPECT_EQ(tensor_bytes(Format::kQ4_0, Shape{}), std::nullopt);
  EXPECT_EQ(tensor_bytes(Format::kF32, Shape{int64_t{1} << 62}), std::nullopt);
  EXPECT_EQ(tensor_bytes(Format::kF32, Shape{int64_t{1} << 60}), uint64_t{1} << 62);
}

TEST(Weights, AsMatrix) {
  const std::byte data[4 * 6] = {};
  WeightTensor tensor;
  tensor.name = "w\n";
  tensor.shape = {2, 3};
  tensor.data = data;
  const QuantMatrix matrix = as_matrix(tensor, 2, 3);
  EXPECT_EQ(matrix.n, 2);
  EXPECT_EQ(matrix.k, 3);
  EXPECT_EQ(matrix.format, Format::kF32);
  EXPECT_EQ(matrix.codes, data);
  EXPECT_EQ(matrix.num_bytes(), 24);
  expect_malformed("tensor \"w\\n\" has shape [2, 3], expected [3, 2]", [&] { as_matrix(tensor, 3, 2); });
  tensor.shape = {6};
  expect_malformed("has shape [6], expected [6, 1]", [&] { as_matrix(tensor, 6, 1); });
}

TEST(Safetensors, ReadsTensors) {
  const std::string text =
      image(concat("{\"__metadata__\":{\"format\":\"pt\"},", entry("b", "F32", "[2,1]", 6, 14), ",",
                   entry("a", "BF16", "[3]", 0, 6), ",", entry("scalar", "F16", "[]", 14, 16), ",",
                   entry("none", "F32", "[0,4]", 16, 16), ",", entry("ids", "I64", "[1]", 16, 24), "}   "),
            24);
  const Tensors read_tensors = read(text);
  ASSERT_EQ(read_tensors.tensors.size(), 4u);
  const WeightTensor& b = read_tensors.tensors.find("b")->second;
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.format, Format::kF32);
  EXPECT_EQ(b.shape, (Shape{2, 1}));
  EXPECT_EQ(b.num_bytes, 8u);
  EXPECT_EQ(static_cast<int>(b.data[0]), 6);
  EXPECT_EQ(reinterpret_cast<const char*>(b.data), text.data() + b.offset);
  EXPECT_EQ(read_tensors.tensors.find("a")->second.format, Format::kBF16);
  EXPECT_EQ(read_tensors.tensors.find("scalar")->second.num_values(), 1);
  EXPECT_EQ(read_tensors.tensors.find("none")->second.num_values(), 0);
  ASSERT_EQ(read_tensors.raw.size(), 1u);
  EXPECT_EQ(read_tensors.raw.find("ids")->second.type, "I64");
}

TEST(Safetensors, KnowsEveryTypeOfTheFormat) {
  struct Case {
    const char* name;
    int64_t num_bytes;  // of 8 values
  };
  for (const auto& [name, num_bytes] :
       {Case{"BOOL", 8}, Case{"F4", 4}, Case{"F6_E2M3", 6}, Case{"F6_E3M2", 6}, Case{"U8", 8}, Case{"I8", 8},
        Case{"F8_E5M2", 8}, Case{"F8_E4M3", 8}, Case{"F8_E8M0", 8}, Case{"I16", 16}, Case{"U16", 16}, Case{"I32", 32},
        Case{"U32", 32}, Case{"C64", 64}, Case{"F64", 64}, Case{"I64", 64}, Case{"U64", 64}}) {
    const std::string text =
        image(concat("{", entry("x", name, "[8]", 0, num_bytes), "}"), static_cast<size_t>(num_bytes));
    const Tensors tensors = read(text);
    EXPECT_TRUE(tensors.tensors.empty());
    EXPECT_EQ(tensors.raw.find("x")->second.type, name);
  }
  expect_entry_rejected(entry("x", "F4", "[31]", 0, 16), "of shape [31] and type F4 does not fill whole bytes");
  expect_entry_rejected(entry("x", "Q4\\n", "[4]", 0, 16), "tensor \"x\" has the unknown type \"Q4\\n\"");
}

TEST(Safetensors, HeaderLength) {
  expect_malformed("\"x.safetensors\": the file is empty", [] { read(""); });
  expect_malformed("the file ends inside the length of the header", [] { read("1234567"); });
  std::string text = image("{}", 0);
  EXPECT_TRUE(read(text).tensors.empty());
  for (const uint64_t claim : {uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 8}) {
    std::memcpy(text.data(), &claim, sizeof(claim));
    expect_malformed(concat("the header claims ", claim, " bytes; the file has 10"), [&] { read(text); });
  }
}

TEST(Safetensors, HeaderText) {
  expect_rejected("", 0, "header of x.safetensors, line 1, column 1: the text ends");
  expect_rejected("[]", 0, "the header is not a JSON object");
  expect_rejected("{\"x\":}", 0, "line 1, column 6: expected a value");
  expect_entry_rejected(concat(entry("x", "F32", "[2]", 0, 8), ",", entry("x", "F32", "[2]", 8, 16)),
                        "\"x\" is there twice");
  expect_entry_rejected("\"x\":3", "tensor \"x\" is not described by an object");
  expect_entry_rejected("\"x\":{\"shape\":[4],\"data_offsets\":[0,16]}", "tensor \"x\" has no \"dtype\"");
  expect_entry_rejected("\"x\":{\"dtype\":\"F32\",\"data_offsets\":[0,16]}", "tensor \"x\" has no \"shape\"");
  expect_entry_rejected("\"x\":{\"dtype\":\"F32\",\"shape\":[4]}", "tensor \"x\" has no \"data_offsets\"");
  expect_entry_rejected("\"x\":{\"dtype\":1,\"shape\":[4],\"data_offsets\":[0,16]}",
                        "tensor \"x\": \"dtype\" must be a string, not an integer");
  expect_entry_rejected(entry("x", "F32", "4", 0, 16), "tensor \"x\": \"shape\" must be an array, not an integer");
  expect_entry_rejected(entry("\\u001b", "F32", "4", 0, 16), "tensor \"\\x1b\":");
}

TEST(Safetensors, Shapes) {
  expect_entry_rejected(entry("x", "F32", "[-4]", 0, 16), "\"shape\" must hold integers from 0 to 2^63 - 1");
  expect_entry_rejected(entry("x", "F32", "[4.0]", 0, 16), "\"shape\" must hold integers");
  expect_entry_rejected(entry("x", "F32", "[\"4\"]", 0, 16), "\"shape\" must hold integers");
  expect_entry_rejected(entry("x", "F32", "[9223372036854775808]", 0, 16), "\"shape\" must hold integers");
  expect_entry_rejected(entry("x", "F32", "[1099511627776,1099511627776]", 0, 16), "does not fit the address space");
  expect_entry_rejected(entry("x", "F32", "[4611686018427387904]", 0, 16), "does not fit the address space");
  expect_entry_rejected(entry("x", "F32", "[0,1099511627776,1099511627776]", 0, 0), "does not fit the address space");
  expect_entry_rejected(entry("x", "F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4]", 0, 16),
                        "has 17 dimensions, at most 16 are allowed");
  expect_entry_rejected(entry("x", "F32", "[3]", 0, 16),
                        "tensor \"x\" of shape [3] and type F32 needs 12 bytes, \"data_offsets\" give 16");
  expect_entry_rejected(entry("x", "I64", "[3]", 0, 16), "type I64 needs 24 bytes");
}

TEST(Safetensors, Offsets) {
  expect_entry_rejected(entry("x", "F32", "[4]", 16, 0), "must have \"data_offsets\" [begin, end], not [16, 0]");
  expect_entry_rejected(entry("x", "F32", "[4]", -16, 0), "\"data_offsets\" must hold integers from 0");
  expect_entry_rejected("\"x\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16,32]}", "not [0, 16, 32]");
  expect_entry_rejected("\"x\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[]}", "not []");
  expect_entry_rejected(entry("x", "F32", "[5]", 0, 20), "tensor \"x\" ends at byte 20 of 16 bytes of data");
  expect_entry_rejected(entry("x", "F32", "[4]", 9223372036854775791, 9223372036854775807), "ends at byte");
  expect_entry_rejected(entry("x", "F32", "[3]", 0, 12), "the tensors end at byte 12 of 16 bytes of data");
  expect_entry_rejected(entry("x", "F32", "[3]", 4, 16), "tensor \"x\" starts at byte 4 of the data, leaving a gap");
  expect_entry_rejected(concat(entry("x", "F32", "[3]", 0, 12), ",", entry("y", "F32", "[2]", 8, 16)),
                        "tensor \"y\" starts at byte 8 of the data, overlapping");
  expect_entry_rejected(concat(entry("x", "F32", "[4]", 0, 16), ",", entry("y", "I32", "[4]", 0, 16)), "overlapping");
  expect_entry_rejected("", "the tensors end at byte 0 of 16 bytes of data");
}

TEST(Safetensors, EveryTruncationIsRejected) {
  const std::string text =
      image(concat("{", entry("a", "F32", "[2,1]", 0, 8), ",", entry("\\u00e9", "I64", "[1]", 8, 16), "}"), 16);
  EXPECT_NO_THROW(read(text));
  for (size_t size = 0; size < text.size(); ++size) {
    SCOPED_TRACE(size);
    const std::string cut = text.substr(0, size);
    expect_error(ErrorCode::kModelFormat, "x.safetensors", [&] { read(cut); });
  }
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int change : {0x01, 0x10, 0x80, 0xff}) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ change);
      try {
        for (const auto& [name, tensor] : read(changed).tensors) {
          ASSERT_LE(tensor.offset + tensor.num_bytes, changed.size());
        }
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kModelFormat) << i << ": " << error.what();
      }
    }
  }
}

class Folder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "shoal_io_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, std::string_view content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
  }

  void write_model() const {
    write("config.json", "{\"model_type\": \"llama\"}");
    write("model.safetensors",
          image(concat("{", entry("w", "F32", "[2,2]", 0, 16), ",", entry("ids", "I64", "[1]", 16, 24), "}"), 24));
  }

  void write_shards() const {
    write("config.json", "{}");
    write("one.safetensors",
          image(concat("{", entry("a", "F32", "[2]", 0, 8), ",", entry("b", "F16", "[4]", 8, 16), "}"), 16));
    write("two.safetensors",
          image(concat("{", entry("c", "F32", "[1]", 0, 4), ",", entry("t", "U8", "[2]", 4, 6), "}"), 6));
    write_index(
        "{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\",\"b\":\"one.safetensors\","
        "\"t\":\"two.safetensors\"}");
  }
  void write_index(std::string_view weight_map) const {
    write("model.safetensors.index.json", concat("{\"metadata\":{\"total_size\":20},\"weight_map\":", weight_map, "}"));
  }

  void expect_folder_rejected(std::string_view message) const {
    expect_malformed(message, [&] { ModelFolder{folder_}; });
  }

  std::filesystem::path folder_;
};

TEST_F(Folder, ReadsASingleFile) {
  write_model();
  const ModelFolder model(folder_);
  EXPECT_EQ(model.path(), folder_);
  EXPECT_EQ(model.config().find("model_type")->as_string("model_type"), "llama");
  const WeightTensor& w = model.get("w", Shape{2, 2});
  EXPECT_EQ(w.num_bytes, 16u);
  EXPECT_EQ(static_cast<int>(w.data[15]), 15);
  model.drop(w);
  EXPECT_EQ(static_cast<int>(w.data[15]), 15);
  EXPECT_EQ(model.total_bytes(), 24u);  // the packed ids too
  EXPECT_EQ(model.find("absent"), nullptr);
}

TEST_F(Folder, GivesTensorsOfOtherTypesAsBytes) {
  write_model();
  const ModelFolder model(folder_);
  const RawTensor* ids = model.find_raw("ids", "I64", Shape{1});
  ASSERT_NE(ids, nullptr);
  EXPECT_EQ(ids->num_bytes, 8u);
  EXPECT_EQ(ids->data, model.find("w")->data + 16);
  model.drop(*ids);
  EXPECT_TRUE(model.has_raw("ids"));
  EXPECT_FALSE(model.has_raw("w"));
  EXPECT_EQ(model.find_raw("absent", "I64", Shape{1}), nullptr);
  expect_error(ErrorCode::kModelFormat, "tensor \"ids\" is I64 [1], expected I32 [1]",
               [&] { model.find_raw("ids", "I32", Shape{1}); });
  expect_error(ErrorCode::kModelFormat, "tensor \"ids\" is I64 [1], expected I64 [2]",
               [&] { model.find_raw("ids", "I64", Shape{2}); });
}

TEST_F(Folder, GetChecksWhatIsAskedFor) {
  write_model();
  const ModelFolder model(folder_);
  expect_malformed("tensor \"absent\\n\" is missing", [&] { model.get("absent\n", Shape{2}); });
  expect_malformed("tensor \"w\" has shape [2, 2], expected [4]", [&] { model.get("w", Shape{4}); });
  expect_malformed("tensor \"w\" has shape [2, 2], expected [2, 3]", [&] { model.get("w", Shape{2, 3}); });
  expect_malformed("tensor \"w\" has shape [2, 2], expected []", [&] { model.get("w", Shape{}); });
  EXPECT_EQ(model.find("ids"), nullptr);
  expect_error(ErrorCode::kUnsupported, "tensor \"ids\" has type I64, which is not supported",
               [&] { model.get("ids", Shape{1}); });
}

TEST_F(Folder, ReadsShards) {
  write_shards();
  const ModelFolder model(folder_);
  ASSERT_EQ(model.tensors().size(), 3u);
  EXPECT_EQ(model.find("a")->file_idx, model.find("b")->file_idx);
  EXPECT_NE(model.find("a")->file_idx, model.find("c")->file_idx);
  EXPECT_EQ(static_cast<int>(model.find("b")->data[0]), 8);
  model.drop(*model.find("c"));
  EXPECT_EQ(static_cast<int>(model.find("c")->data[3]), 3);
  expect_error(ErrorCode::kUnsupported, "type U8", [&] { model.get("t", Shape{2}); });
}

TEST_F(Folder, FollowsLinksAsDownloadCachesHaveThem) {
  write_model();
  std::filesystem::create_directory(folder_ / "snapshot");
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(folder_ / name, folder_ / "snapshot" / name);
  }
  EXPECT_EQ(ModelFolder(folder_ / "snapshot").tensors().size(), 1u);
}

TEST_F(Folder, MissingParts) {
  expect_error(ErrorCode::kInvalidArgument, "absent\" does not exist", [&] { ModelFolder(folder_ / "absent"); });
  expect_error(ErrorCode::kInvalidArgument, "model \"\" does not exist", [] { ModelFolder(""); });
  expect_folder_rejected("\" has no config.json");
  write("config.json", "{}");
  expect_folder_rejected("\" has neither model.safetensors nor model.safetensors.index.json");
  expect_error(ErrorCode::kInvalidArgument, "config.json\" is not a folder",
               [&] { ModelFolder(folder_ / "config.json"); });
  write("model.safetensors", "");
  expect_folder_rejected("\"model.safetensors\": the file is empty");
}

TEST_F(Folder, TellsFoldersFromFiles) {
  write("file", "x");
  EXPECT_TRUE(is_model_folder(folder_));
  EXPECT_FALSE(is_model_folder(folder_ / "file"));
  expect_error(ErrorCode::kInvalidArgument, "model \"", [&] { is_model_folder(folder_ / "a\nb"); });
  expect_error(ErrorCode::kInvalidArgument, "a\\nb\" does not exist", [&] { is_model_folder(folder_ / "a\nb"); });
  expect_error(ErrorCode::kIo, "cannot look at model", [&] { is_model_folder(folder_ / std::string(5000, 'x')); });
}

TEST_F(Folder, BadConfig) {
  write_model();
  write("config.json", "");
  expect_folder_rejected("config.json, line 1, column 1: the text ends");
  write("config.json", "[1]");
  expect_folder_rejected("config.json must be an object, not an array");
  write("config.json", std::string(16'000'001, ' '));
  expect_folder_rejected("config.json\" has 16000001 bytes, at most 16000000 are allowed");
}

TEST_F(Folder, BadIndex) {
  const auto rejected = [&](std::string_view weight_map, std::string_view message) {
    write_shards();
    write_index(weight_map);
    expect_folder_rejected(message);
  };
  rejected("[]", "model.safetensors.index.json has no object \"weight_map\"");
  rejected("{\"a\":1}", "weight_map of \"a\" must be a string, not an integer");
  for (const char* name : {"../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "", "a\\\\b",
                           "one.safetensors\\u0000"}) {
    rejected(concat("{\"a\":\"", name, "\"}"), "is not the name of a file in the folder");
  }
  rejected("{\"a\":\"three.safetensors\"}", "names \"three.safetensors\", which is missing");
  rejected("{\"a\":\"two.safetensors\"}", "says that tensor \"a\" is in \"two.safetensors\", but it is not");
  rejected("{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}", "says that tensor \"b\" is in \"two.safetensors\"");
  rejected("{\"t\":\"one.safetensors\",\"c\":\"two.safetensors\"}", "says that tensor \"t\" is in \"one.safetensors\"");
  rejected("{\"new\\n\":\"one.safetensors\"}", "says that tensor \"new\\n\" is in");
  write_shards();
  write("two.safetensors", image(concat("{", entry("a", "I32", "[1]", 0, 4), "}"), 4));
  expect_folder_rejected("\"two.safetensors\": tensor \"a\" is in another file too");
  write("model.safetensors.index.json", "{\"weight_map\":{}");
  expect_folder_rejected("model.safetensors.index.json, line 1, column 17: the text ends");
}

TEST_F(Folder, ManyShardTensorsAreReadInTime) {
  std::string header = "{";
  std::string weight_map = "{";
  constexpr int kNumTensors = 50'000;
  for (int i = 0; i < kNumTensors; ++i) {
    const std::string name = concat("model.layers.", i / 768, ".experts.", i % 768, ".weight");
    header += concat(i == 0 ? "" : ",", entry(name, "F32", "[1]", 4 * i, 4 * i + 4));
    weight_map += concat(i == 0 ? "" : ",", "\"", name, "\":\"one.safetensors\"");
  }
  write("config.json", "{}");
  write("one.safetensors", image(header + "}", 4 * kNumTensors));
  write_index(weight_map + "}");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(ModelFolder(folder_).tensors().size(), static_cast<size_t>(kNumTensors));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace shoal::io
