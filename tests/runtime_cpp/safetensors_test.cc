#include "engine/safetensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "rank_file_builder.h"
#include "support/page_buffer.h"

namespace aotllm {
namespace {

using testing_support::file_bytes;

/// Parses a copy on a page boundary, as a mapping is.
std::string error_of(const std::vector<std::uint8_t>& file) {
  PageBuffer memory(file.size());
  std::copy(file.begin(), file.end(), memory.data());
  try {
    SafeTensors::parse({memory.data(), file.size()}, "f.engine");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kEngine);
    return error.what();
  }
  return "";
}

std::vector<std::uint8_t> with_data(const std::string& header, std::size_t data_bytes) {
  return file_bytes(header, std::vector<std::uint8_t>(data_bytes, 7));
}

TEST(SafeTensors, ReadsTensorsAndMetadata) {
  testing_support::RankFileBuilder builder;
  builder.add_floats("norm", {1.0f, 2.0f, 3.0f});
  builder.add_bytes("panels", std::vector<std::uint8_t>(128, 9));
  const auto bytes = builder.build("a \"plan\"\n");
  PageBuffer memory(bytes.size());
  std::copy(bytes.begin(), bytes.end(), memory.data());
  const SafeTensors file = SafeTensors::parse({memory.data(), bytes.size()}, "f.engine");

  EXPECT_EQ(file.metadata("plan"), "a \"plan\"\n");
  const Tensor& norm = file.tensor("norm");
  EXPECT_EQ(norm.dtype, DType::kF32);
  EXPECT_EQ(norm.shape, std::vector<std::int64_t>{3});
  EXPECT_EQ(std::vector<float>(norm.floats().begin(), norm.floats().end()), (std::vector<float>{1.0f, 2.0f, 3.0f}));
  const Tensor& panels = file.tensor("panels");
  EXPECT_EQ(panels.bytes.size(), 128u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(panels.bytes.data()) % 64, 0u);
  EXPECT_THROW(file.tensor("gone"), Error);
  EXPECT_THROW(file.metadata("gone"), Error);
}

TEST(SafeTensors, AcceptsScalarsEmptyTensorsAndNoTensors) {
  EXPECT_EQ(error_of(with_data("{}", 0)), "");
  EXPECT_EQ(error_of(with_data(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4)), "");
  EXPECT_EQ(error_of(with_data(R"({"a":{"dtype":"U8","shape":[0,5],"data_offsets":[0,0]}})", 0)), "");
}

TEST(SafeTensors, RefusesDamagedFiles) {
  const std::string a = R"("a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]})";
  const struct {
    const char* what;
    std::vector<std::uint8_t> file;
    const char* reason;
  } cases[] = {
      {"shorter than its length field", {1, 2, 3}, "at least 8 bytes, got 3"},
      {"length beyond the file", {255, 0, 0, 0, 0, 0, 0, 0, '{', '}'}, "the header claims 255 bytes, the file has 2"},
      {"length beyond all files", {255, 255, 255, 255, 255, 255, 255, 255, '{', '}'}, "the header claims"},
      {"data not on 64 bytes", {2, 0, 0, 0, 0, 0, 0, 0, '{', '}'}, "starts at byte 10, expected a multiple of 64"},
      {"header is no JSON", with_data("{", 0), "invalid JSON"},
      {"header is no object", with_data("[]", 0), "expected an object"},
      {"metadata is no object", with_data(R"({"__metadata__":3})", 0), "__metadata__: expected an object, got 3"},
      {"metadata is no text", with_data(R"({"__metadata__":{"plan":{}}})", 0), "__metadata__.plan: expected a string"},
      {"tensor is no object", with_data(R"({"a":1})", 0), "tensor \"a\": expected an object"},
      {"no dtype", with_data(R"({"a":{"shape":[],"data_offsets":[0,1]}})", 1), "\"dtype\" is missing"},
      {"unknown dtype", with_data(R"({"a":{"dtype":"I64","shape":[8],"data_offsets":[0,64]}})", 64), "U8 or F32"},
      {"unknown field", with_data(R"({"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64],"x":1}})", 64),
       "unknown field"},
      {"negative dimension", with_data(R"({"a":{"dtype":"U8","shape":[-64],"data_offsets":[0,64]}})", 64), "got -64"},
      {"shape is no integer", with_data(R"({"a":{"dtype":"U8","shape":[64.0],"data_offsets":[0,64]}})", 64), "integer"},
      {"shape overflows",
       with_data(R"({"a":{"dtype":"F32","shape":[64,64,64,64,64,64,64,64,64,64,64],"data_offsets":[0,64]}})", 64),
       "at most 64 bytes"},
      {"size differs from the offsets", with_data(R"({"a":{"dtype":"F32","shape":[15],"data_offsets":[0,64]}})", 64),
       "60 bytes for this dtype and shape, got 64"},
      {"end before begin", with_data(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[64,0]}})", 64), "got 0"},
      {"three offsets", with_data(R"({"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64,64]}})", 64), "[begin, end]"},
      {"beyond the file", with_data("{" + a + "}", 63), "shape: expected at most 63 bytes of data"},
      {"offsets beyond the file", with_data(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,64]}})", 63),
       "an integer in [0, 63], got 64"},
      {"bytes after the last tensor", with_data("{" + a + "}", 65),
       "tensors end at byte 64 of the data, the file has 65"},
      {"hole", with_data("{" + a + R"(,"b":{"dtype":"U8","shape":[64],"data_offsets":[128,192]}})", 192),
       "bytes [64, 128) before tensor \"b\" belong to no tensor"},
      {"overlap", with_data("{" + a + R"(,"b":{"dtype":"U8","shape":[128],"data_offsets":[0,128]}})", 128), "overlaps"},
      {"tensor not on 64 bytes",
       with_data(R"({"p":{"dtype":"U8","shape":[32],"data_offsets":[32,64]},
                     "__pad.0":{"dtype":"U8","shape":[32],"data_offsets":[0,32]}})",
                 64),
       "a multiple of 64, got 32"},
      {"the same tensor twice", with_data("{" + a + "," + a + "}", 64), "key \"a\" twice"},
  };
  for (const auto& c : cases) {
    const std::string message = error_of(c.file);
    EXPECT_NE(message.find(c.reason), std::string::npos) << c.what << " → " << message;
    EXPECT_EQ(message.rfind("f.engine", 0), 0u) << message;
  }
}

TEST(SafeTensors, RefusesEveryTruncation) {
  testing_support::RankFileBuilder builder;
  builder.add_floats("norm", {1.0f, 2.0f, 3.0f});
  const auto file = builder.build("{}");
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(error_of({file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)}), "") << size << " bytes";
  }
}

}  // namespace
}  // namespace aotllm
