#include "engine/plan.h"

#include <utility>

#include "aotllm/errors.h"
#include "engine/plan_reader.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMaxRanks = 1024;
constexpr std::int64_t kMaxLayers = 4096;
constexpr std::int64_t kMaxHeads = 4096;
constexpr std::int64_t kMaxTokensPerBlock = 1024;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 46;

int dimension(const JsonField& field) {
  return static_cast<int>(field.integer(1, kMaxDimension));
}

Target read_target(const JsonField& root) {
  const auto refuse = [&](const JsonField& field, const std::string& needs, const std::string& here) {
    throw Error(ErrorKind::kEngineIncompatible, cat(field.path(), ": the engine needs ", needs, ", this runtime has ",
                                                    here, "; rebuild it with `aotllm build` of this version"));
  };
  const JsonField version = root.at("version");
  if (const auto v = version.integer(1, kMaxDimension); v != kPlanVersion) {
    refuse(version, cat("plan version ", v), cat("version ", kPlanVersion));
  }
  const JsonField target = root.at("target");
  if (target.string() == "cuda") return Target::kCuda;
  if (target.string() != "cpu") refuse(target, cat("target ", target.string()), "targets cpu and cuda");
  return Target::kCpu;
}

/// Which rank of how many the plan is for.
void read_parallel(const JsonField& root, Plan& plan) {
  if (const auto tp = root.optional("tp")) {
    tp->only({"size", "rank"});
    plan.tp_size = static_cast<int>(tp->at("size").integer(1, kMaxRanks));
    plan.tp_rank = static_cast<int>(tp->at("rank").integer(0, plan.tp_size - 1));
  }
  if (const auto pp = root.optional("pp")) {
    pp->only({"size", "rank", "layers", "entering", "leaving"});
    plan.pp_size = static_cast<int>(pp->at("size").integer(1, kMaxRanks));
    plan.pp_rank = static_cast<int>(pp->at("rank").integer(0, plan.pp_size - 1));
  }
}

/// What else the plan says of its stage: its layers, of all those that are read, and its ends.
void read_stage(const JsonField& root, PlanReader& reader) {
  Plan& plan = reader.plan();
  plan.layer_end = static_cast<int>(plan.kv.layers.size());
  const auto pp = root.optional("pp");
  if (!pp) return;
  const JsonField layers = pp->at("layers");
  if (layers.size() != 2) layers.fail("[begin, end]");
  plan.layer_end = static_cast<int>(layers[1].integer(1, plan.layer_end));
  plan.layer_begin = static_cast<int>(layers[0].integer(0, plan.layer_end - 1));
  for (int layer = 0; layer < static_cast<int>(plan.kv.layers.size()); ++layer) {
    plan.kv.layers[layer].is_held = layer >= plan.layer_begin && layer < plan.layer_end;
  }
  const auto end = [&](const char* key, bool is_there) {
    if (is_there) return reader.buffer(pp->at(key), plan.hidden_size);
    if (const auto field = pp->optional(key)) field->fail("no buffer at this end of the pipeline");
    return -1;
  };
  plan.entering = end("entering", !plan.is_first_stage());
  plan.leaving = end("leaving", !plan.is_last_stage());
}

void read_shape(const JsonField& root, Plan& plan) {
  plan.vocab_size = dimension(root.at("vocab_size"));
  plan.hidden_size = dimension(root.at("hidden_size"));
  plan.max_seq_len = dimension(root.at("max_seq_len"));
  plan.max_num_tokens = static_cast<int>(root.at("max_num_tokens").integer(1, kMaxTokens));
  plan.max_batch_size = static_cast<int>(root.at("max_batch_size").integer(1, kMaxTokens));
  const JsonField vocab = root.at("vocab_size");
  if (plan.vocab_size < plan.tp_size) vocab.fail(cat("a token for each of ", plan.tp_size, " ranks"));
  if (plan.target == Target::kCuda && plan.vocab_size % plan.tp_size != 0) {
    vocab.fail(cat("a multiple of the ", plan.tp_size, " ranks"));
  }
}

void read_buffers(const JsonField& root, Plan& plan) {
  const JsonField arena = root.at("arena_bytes");
  plan.arena_bytes = arena.integer(0, kMaxBytes);
  const JsonField buffers = root.at("buffers");
  const std::int64_t alignment = plan.target == Target::kCuda ? 256 : 64;
  std::int64_t most = 0;  // all buffers side by side
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const JsonField field = buffers[i];
    field.only({"name", "width", "offset"});
    Buffer buffer;
    buffer.name = field.at("name").string();
    buffer.width = dimension(field.at("width"));
    const std::int64_t bytes = plan.buffer_bytes(buffer);
    const JsonField offset = field.at("offset");
    buffer.offset = offset.integer(0, kMaxBytes);
    if (buffer.offset % alignment != 0) offset.fail(cat("a multiple of ", alignment));
    if (buffer.offset + bytes > plan.arena_bytes) {
      offset.fail(cat("[offset, offset + ", bytes, ") within the arena of ", plan.arena_bytes, " bytes"));
    }
    most += (bytes + alignment - 1) / alignment * alignment;
    plan.buffers.push_back(std::move(buffer));
  }
  if (plan.arena_bytes > most) arena.fail(cat("at most ", most, " bytes, the sum of the buffers"));
}

void read_rope(const JsonField& root, PlanReader& reader) {
  const JsonField tables = root.at("rope");
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const JsonField field = tables[i];
    field.only({"inv_freq", "attention_factor"});
    const JsonField name = field.at("inv_freq");
    const auto size = static_cast<std::int64_t>(reader.tensor(name).bytes.size() / sizeof(float));
    if (size < 1 || size > cpu::kMaxHeadDim / 2) name.fail(cat("1 to ", cpu::kMaxHeadDim / 2, " values"), cat(size));
    RopeTable table;
    table.inv_freq = reader.vector(name, size);
    table.attention_factor = static_cast<float>(field.at("attention_factor").number(1e-6, 1e6));
    reader.plan().rope.push_back(table);
  }
}

void read_kv(const JsonField& root, PlanReader& reader) {
  Plan& plan = reader.plan();
  const JsonField kv = root.at("kv");
  kv.only({"dtype", "tokens_per_block", "layers"});
  const JsonField dtype = kv.at("dtype");
  plan.kv.target = plan.target;
  if (plan.target == Target::kCuda) {
    if (dtype.string() == "fp8") {
      plan.kv.device_dtype = DeviceKvType::kFp8;
    } else if (dtype.string() != "bf16") {
      dtype.fail("bf16 or fp8");
    }
  } else if (dtype.string() == "bf16") {
    plan.kv.dtype = cpu::KvType::kBF16;
  } else if (dtype.string() == "int16") {
    plan.kv.dtype = cpu::KvType::kI16;
  } else if (dtype.string() == "int8") {
    plan.kv.dtype = cpu::KvType::kI8;
  } else if (dtype.string() == "f16") {  // of engines before int16
    throw Error(ErrorKind::kEngineIncompatible,
                cat(dtype.path(),
                    ": the engine needs a float16 KV cache, this runtime has f32, bf16, int16 and int8; "
                    "rebuild it with `aotllm build` of this version"));
  } else if (dtype.string() != "f32") {
    dtype.fail("f32, bf16, int16 or int8");
  }
  const JsonField tokens = kv.at("tokens_per_block");
  plan.kv.tokens_per_block = static_cast<int>(tokens.integer(16, kMaxTokensPerBlock));
  if (plan.kv.tokens_per_block % 16 != 0) tokens.fail("a multiple of 16");

  const JsonField layers = kv.at("layers");
  if (layers.size() < 1 || layers.size() > kMaxLayers) {
    layers.fail(cat("1 to ", kMaxLayers, " layers"), cat(layers.size()));
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const JsonField field = layers[i];
    field.only({"num_kv_heads", "head_dim", "window"});
    KvLayer layer;
    layer.num_kv_heads = static_cast<int>(field.at("num_kv_heads").integer(1, kMaxHeads));
    const JsonField head_dim = field.at("head_dim");
    layer.head_dim = static_cast<int>(head_dim.integer(8, cpu::kMaxHeadDim));
    if (layer.head_dim % 8 != 0) head_dim.fail("a multiple of 8");
    layer.window = static_cast<int>(field.at("window").integer(0, kMaxDimension));
    plan.kv.layers.push_back(layer);
  }
  read_stage(root, reader);
  assign_kv_groups(plan.kv, plan.max_seq_len);
}

LinearSegment read_segment(const JsonField& field, const PlanReader& reader, const Linear& linear) {
  field.only({"n", "format", "tensor"});
  LinearSegment segment;
  segment.row_begin = linear.n;
  segment.panel_begin = linear.panels;
  cpu::Segment& weights = segment.weights;
  weights.n = dimension(field.at("n"));
  weights.k = linear.k;
  const JsonField format = field.at("format");
  if (!cpu::parse_format(format.string().c_str(), weights.format)) format.fail("a format of this runtime");
  if (!cpu::is_float_format(weights.format) && linear.k % cpu::kWeightBlock != 0) {
    format.fail("a float format, as k is no multiple of 32");
  }

  const JsonField name = field.at("tensor");
  const Tensor& tensor = reader.tensor(name);
  const std::size_t bytes = cpu::segment_bytes(weights.format, weights.n, weights.k);
  if (tensor.dtype != DType::kU8 || tensor.bytes.size() != bytes) {
    name.fail(cat("a U8 tensor of ", bytes, " bytes"),
              cat(tensor.dtype == DType::kU8 ? "U8" : "F32", " of ", tensor.bytes.size(), " bytes"));
  }
  weights.panels = tensor.bytes.data();
  return segment;
}

/// The bytes that `field` names, which are as many as `bytes`.
std::span<const std::uint8_t> read_bytes(const JsonField& field, const PlanReader& reader, std::int64_t bytes) {
  const Tensor& tensor = reader.tensor(field);
  if (tensor.dtype != DType::kU8 || std::ssize(tensor.bytes) != bytes) {
    field.fail(cat("a U8 tensor of ", bytes, " bytes"),
               cat(tensor.dtype == DType::kU8 ? "U8" : "F32", " of ", tensor.bytes.size(), " bytes"));
  }
  return tensor.bytes;
}

/// A float32 tensor [size], whatever its shape.
std::span<const float> read_floats(const JsonField& field, const PlanReader& reader, std::int64_t size) {
  const Tensor& tensor = reader.tensor(field);
  if (tensor.dtype != DType::kF32 || std::ssize(tensor.floats()) != size) {
    field.fail(cat("an F32 tensor of ", size, " values"), cat(field.string(), " of ", tensor.bytes.size(), " bytes"));
  }
  return tensor.floats();
}

/// Codes in blocks of 64 rows × 128 columns, and scales and zeros of groups of columns, or a scale per row.
Matrix read_integers(const JsonField& field, const PlanReader& reader, std::int64_t n, std::int64_t k) {
  const bool four_bits = field.at("format").string() == "int4";
  const std::int64_t strips = (n + 63) / 64;
  const std::int64_t k_blocks = (k + 127) / 128;
  Matrix matrix;
  matrix.format = four_bits ? MatrixFormat::kInt4 : MatrixFormat::kInt8;
  matrix.data = read_bytes(field.at("tensor"), reader, strips * k_blocks * (four_bits ? 4096 : 8192));
  if (!four_bits && !field.optional("group").has_value()) {
    if (field.optional("zeros").has_value()) field.at("zeros").fail("no zeros without a group");
    matrix.scales = read_floats(field.at("scales"), reader, n);
    return matrix;
  }
  const JsonField group = field.at("group");
  const std::int64_t columns = group.integer(1, 128);
  if (columns != 32 && (columns != 128 || !four_bits)) group.fail(four_bits ? "32 or 128" : "32");
  const std::int64_t groups = strips * 64 * (k_blocks * 128 / columns);
  matrix.group = static_cast<int>(columns);
  matrix.scales = read_floats(field.at("scales"), reader, groups);
  matrix.zeros = read_bytes(field.at("zeros"), reader, groups);
  return matrix;
}

Linear read_matrix(const JsonField& field, const PlanReader& reader, const std::string& name) {
  field.only({"n", "k", "format", "tensor", "scales", "zeros", "group"});
  Linear linear;
  linear.name = name;
  linear.n = dimension(field.at("n"));
  linear.k = dimension(field.at("k"));
  const std::int64_t n = linear.n;
  const std::int64_t k = linear.k;
  const JsonField format = field.at("format");
  const JsonField tensor = field.at("tensor");
  Matrix& matrix = linear.matrix;
  const std::string& text = format.string();
  const std::int64_t k_blocks = (k + 127) / 128;
  if (text == "bf16") {
    matrix = {MatrixFormat::kBf16, read_bytes(tensor, reader, 2 * n * k), {}, {}};
  } else if (text == "fp8") {
    matrix = {MatrixFormat::kFp8, read_bytes(tensor, reader, n * k), read_floats(field.at("scales"), reader, n), {}};
  } else if (text == "fp8_block") {
    matrix = {MatrixFormat::kFp8Block,
              read_bytes(tensor, reader, n * k),
              read_floats(field.at("scales"), reader, (n + 127) / 128 * k_blocks),
              {}};
  } else if (text == "int8" || text == "int4") {
    matrix = read_integers(field, reader, n, k);
  } else {
    format.fail("bf16, fp8, fp8_block, int8 or int4");
  }
  return linear;
}

std::string described(const JsonField& field, const Tensor& t) {
  return cat(field.string(), ", ", t.dtype == DType::kF32 ? "F32" : "U8", " of ", t.bytes.size(), " bytes");
}

void read_tactics(const JsonField& root, PlanReader& reader) {
  const JsonField tactics = root.at("tactics");
  for (const auto& [name, json] : tactics.object()) {
    const JsonField field(json, cat(tactics.path(), "[\"", name, "\"]"));
    Linear* linear = reader.find_linear(name);
    if (linear == nullptr) field.fail("the name of a linear");
    for (std::size_t i = 0; i < field.size(); ++i) {
      const JsonField entry = field[i];
      entry.only({"max_rows", "kernel"});
      Tactic tactic;
      const std::int64_t least = linear->tactics.empty() ? 1 : linear->tactics.back().max_rows + 1;
      tactic.max_rows = static_cast<int>(entry.at("max_rows").integer(least, kMaxTokens));
      tactic.kernel = entry.at("kernel").string();
      linear->tactics.push_back(std::move(tactic));
    }
  }
}

void read_linears(const JsonField& root, PlanReader& reader) {
  const JsonField linears = root.at("linears");
  for (const auto& [name, json] : linears.object()) {
    const JsonField field(json, cat(linears.path(), "[\"", name, "\"]"));
    if (reader.plan().target == Target::kCuda) {
      reader.add_linear(read_matrix(field, reader, name));
      continue;
    }
    field.only({"n", "k", "segments"});
    Linear linear;
    linear.name = name;
    linear.k = dimension(field.at("k"));
    const JsonField segments = field.at("segments");
    for (std::size_t i = 0; i < segments.size(); ++i) {
      LinearSegment segment = read_segment(segments[i], reader, linear);
      const cpu::Segment& weights = segment.weights;
      if (weights.format == cpu::Format::kBF16) {
        linear.has_bf16 = true;
      } else {
        (cpu::is_float_format(weights.format) ? linear.has_float : linear.has_block) = true;
      }
      if (linear.n + weights.n > kMaxDimension) segments.fail(cat("at most ", kMaxDimension, " rows"));
      linear.n += weights.n;
      linear.panels += cpu::panels_of(weights.n);
      linear.segments.push_back(std::move(segment));
    }
    const JsonField n = field.at("n");
    if (n.integer(1, kMaxDimension) != linear.n) n.fail(cat(linear.n, ", the rows of the segments"));
    reader.add_linear(std::move(linear));
  }
}

}  // namespace

const Tensor& PlanReader::tensor(const JsonField& field) const {
  try {
    return file_.tensor(field.string());
  } catch (const Error&) {
    field.fail("the name of a tensor in the file");
  }
}

std::span<const float> PlanReader::vector(const JsonField& field, std::int64_t size) const {
  const Tensor& t = tensor(field);
  if (t.dtype != DType::kF32 || t.shape.size() != 1 || t.shape[0] != size) {
    field.fail(cat("an F32 tensor of shape [", size, ']'), described(field, t));
  }
  return t.floats();
}

std::span<const float> PlanReader::matrix(const JsonField& field, std::int64_t rows, std::int64_t columns) const {
  const Tensor& t = tensor(field);
  if (t.dtype != DType::kF32 || t.shape.size() != 2 || t.shape[0] != rows || t.shape[1] != columns) {
    field.fail(cat("an F32 tensor of shape [", rows, ", ", columns, ']'), described(field, t));
  }
  return t.floats();
}

std::span<const float> PlanReader::optional_vector(const JsonField& owner, std::string_view key,
                                                   std::int64_t size) const {
  const auto field = owner.optional(key);
  return field ? vector(*field, size) : std::span<const float>{};
}

int PlanReader::buffer(const JsonField& field) const {
  if (plan_.buffers.empty()) field.fail("a buffer", "a plan without buffers");
  return static_cast<int>(field.integer(0, static_cast<std::int64_t>(plan_.buffers.size()) - 1));
}

int PlanReader::buffer(const JsonField& field, std::int64_t width) const {
  const int index = buffer(field);
  const Buffer& b = plan_.buffers[index];
  if (b.width != width) {
    field.fail(cat("a buffer of width ", width), cat(index, " (\"", b.name, "\", width ", b.width, ')'));
  }
  return index;
}

int PlanReader::linear(const JsonField& field) const {
  const auto it = linear_index_.find(field.string());
  if (it == linear_index_.end()) field.fail("the name of a linear");
  return it->second;
}

void PlanReader::add_linear(Linear linear) {
  linear_index_.emplace(linear.name, static_cast<int>(plan_.linears.size()));
  plan_.linears.push_back(std::move(linear));
}

Linear* PlanReader::find_linear(const std::string& name) {
  const auto it = linear_index_.find(name);
  return it == linear_index_.end() ? nullptr : &plan_.linears[it->second];
}

Plan parse_plan(const SafeTensors& file) {
  const Json json = Json::parse(file.metadata("plan"), cat(file.name(), ": plan"));
  const JsonField root(json, cat(file.name(), ": plan"));
  Plan plan;
  plan.target = read_target(root);
  if (plan.target == Target::kCuda) {
    root.only({"version", "target", "vocab_size", "hidden_size", "max_seq_len", "max_num_tokens", "max_batch_size",
               "arena_bytes", "buffers", "rope", "kv", "linears", "ops", "sm", "tp", "pp", "tactics"});
    plan.sm = static_cast<int>(root.at("sm").integer(50, 999));
  } else {
    root.only({"version", "target", "vocab_size", "hidden_size", "max_seq_len", "max_num_tokens", "max_batch_size",
               "arena_bytes", "buffers", "rope", "kv", "linears", "ops", "tp", "pp"});
  }
  read_parallel(root, plan);
  PlanReader reader(file, plan);
  read_shape(root, plan);
  read_buffers(root, plan);
  read_rope(root, reader);
  read_kv(root, reader);
  read_linears(root, reader);
  if (plan.target == Target::kCuda) read_tactics(root, reader);
  const JsonField ops = root.at("ops");
  for (std::size_t i = 0; i < ops.size(); ++i) plan.ops.push_back(read_op(reader, ops[i]));
  check_dataflow(plan, ops.path());
  return plan;
}

}  // namespace aotllm
