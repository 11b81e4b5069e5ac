#include "engine/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "aotllm/errors.h"
#include "support/json.h"
#include "support/strings.h"

namespace aotllm {
namespace {

static_assert(std::endian::native == std::endian::little, "engines hold little-endian data and are mapped as they are");

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

[[noreturn]] void fail(const std::string& where, const std::string& reason) {
  throw Error(ErrorKind::kEngine, cat(where, ": ", reason));
}

std::uint64_t header_length(std::span<const std::uint8_t> file, const std::string& name) {
  if (file.size() < kLengthBytes) {
    fail(name, cat("expected a safetensors file of at least ", kLengthBytes, " bytes, got ", file.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  const std::uint64_t available = file.size() - kLengthBytes;
  if (length > kMaxHeaderBytes || length > available) {
    fail(name, cat("the header claims ", length, " bytes, the file has ", available, " after its length field (limit ",
                   kMaxHeaderBytes, "); the file is truncated or not safetensors"));
  }
  if ((kLengthBytes + length) % kTensorAlignment != 0) {
    fail(name,
         cat("tensor data starts at byte ", kLengthBytes + length, ", expected a multiple of ", kTensorAlignment));
  }
  return length;
}

std::pair<DType, std::int64_t> parse_dtype(const JsonField& field) {
  const std::string& text = field.string();
  if (text == "U8") return {DType::kU8, 1};
  if (text == "F32") return {DType::kF32, 4};
  field.fail("U8 or F32");
}

struct Extent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::string name;
};

Tensor parse_tensor(const JsonField& field, std::span<const std::uint8_t> data, Extent& extent) {
  field.only({"dtype", "shape", "data_offsets"});
  Tensor tensor;
  const auto [dtype, element_bytes] = parse_dtype(field.at("dtype"));
  tensor.dtype = dtype;

  const auto data_bytes = static_cast<std::int64_t>(data.size());
  const JsonField shape = field.at("shape");
  std::int64_t bytes = element_bytes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::int64_t dimension = shape[i].integer(0, std::numeric_limits<std::int64_t>::max());
    if (dimension != 0 && bytes > data_bytes / dimension) shape.fail(cat("at most ", data_bytes, " bytes of data"));
    bytes *= dimension;
    tensor.shape.push_back(dimension);
  }

  const JsonField offsets = field.at("data_offsets");
  if (offsets.size() != 2) offsets.fail("[begin, end]");
  extent.begin = offsets[0].integer(0, data_bytes);
  extent.end = offsets[1].integer(extent.begin, data_bytes);
  if (extent.end - extent.begin != bytes) {
    offsets.fail(cat(bytes, " bytes for this dtype and shape"), cat(extent.end - extent.begin));
  }
  if (!extent.name.starts_with(kPadPrefix) && extent.begin % static_cast<std::int64_t>(kTensorAlignment) != 0) {
    offsets[0].fail(cat("a multiple of ", kTensorAlignment));
  }
  tensor.bytes = data.subspan(static_cast<std::size_t>(extent.begin), static_cast<std::size_t>(bytes));
  return tensor;
}

/// Every byte of the data belongs to exactly one tensor.
void check_extents(std::vector<Extent> extents, std::int64_t data_bytes, const std::string& name) {
  const auto key = [](const Extent& e) { return std::tie(e.begin, e.end); };
  std::sort(extents.begin(), extents.end(), [&](const Extent& a, const Extent& b) { return key(a) < key(b); });
  std::int64_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin < end) fail(name, cat("tensor \"", extent.name, "\" overlaps the one before it"));
    if (extent.begin > end) {
      fail(name, cat("bytes [", end, ", ", extent.begin, ") before tensor \"", extent.name, "\" belong to no tensor"));
    }
    end = extent.end;
  }
  if (end != data_bytes) {
    fail(name, cat("tensors end at byte ", end, " of the data, the file has ", data_bytes, "; the file is damaged"));
  }
}

}  // namespace

std::span<const float> Tensor::floats() const {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

SafeTensors SafeTensors::parse(std::span<const std::uint8_t> bytes, const std::string& name) {
  const std::uint64_t length = header_length(bytes, name);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  const Json header = Json::parse(text, cat(name, ": header"));
  const std::span<const std::uint8_t> data = bytes.subspan(kLengthBytes + length);

  SafeTensors file;
  file.name_ = name;
  std::vector<Extent> extents;
  for (const auto& [key, value] : JsonField(header, cat(name, ": header")).object()) {
    if (key == "__metadata__") {
      const JsonField metadata(value, cat(name, ": __metadata__"));
      for (const auto& [entry, text_value] : metadata.object()) {
        file.metadata_.emplace(entry, JsonField(text_value, cat(metadata.path(), '.', entry)).string());
      }
      continue;
    }
    Extent extent{0, 0, key};
    file.tensors_.emplace(key, parse_tensor(JsonField(value, cat(name, ": tensor \"", key, '"')), data, extent));
    extents.push_back(std::move(extent));
  }
  check_extents(std::move(extents), static_cast<std::int64_t>(data.size()), name);
  return file;
}

const Tensor& SafeTensors::tensor(std::string_view tensor_name) const {
  const auto it = tensors_.find(tensor_name);
  if (it == tensors_.end()) fail(name_, cat("there is no tensor \"", tensor_name, '"'));
  return it->second;
}

std::string SafeTensors::find_metadata(std::string_view key) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() ? std::string() : it->second;
}

const std::string& SafeTensors::metadata(std::string_view key) const {
  const auto it = metadata_.find(key);
  if (it == metadata_.end()) fail(name_, cat("__metadata__ has no \"", key, '"'));
  return it->second;
}

}  // namespace aotllm
