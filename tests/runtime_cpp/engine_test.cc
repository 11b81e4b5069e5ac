#include "aotllm/engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "engine/plan.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::TinyModel;
using testing_support::TinySpec;

const TinyModel& model() {
  static const TinyModel tiny({.layers = 2, .bias = true, .qk_norm = true, .post_norm = true, .window = 5});
  return tiny;
}

/// The valid plan with the first `from` after `anchor` replaced by `to`.
std::string edited(const std::string& anchor, const std::string& from, const std::string& to) {
  std::string plan = model().plan();
  const auto start = plan.find(anchor);
  const auto at = start == std::string::npos ? start : plan.find(from, start);
  if (at == std::string::npos) throw std::logic_error("the plan has no " + anchor + " … " + from);
  return plan.replace(at, from.size(), to);
}

TEST(Engine, LoadsAValidPlan) {
  const Engine engine = Engine::from_bytes(model().engine_bytes(), "tiny.engine");
  const ModelShape& shape = engine.shape();
  EXPECT_EQ(shape.vocab_size, 50);
  EXPECT_EQ(shape.num_layers, 2);
  EXPECT_EQ(shape.max_seq_len, 128);
  EXPECT_EQ(shape.max_num_tokens, 128);
  EXPECT_EQ(shape.max_batch_size, 16);
  EXPECT_EQ(shape.tokens_per_block, 16);
  ASSERT_EQ(shape.kv_groups.size(), 2u) << "layer 1 has a window";
  EXPECT_EQ(shape.kv_groups[0].window, 0);
  EXPECT_EQ(shape.kv_groups[1].window, 5);
  for (const KvGroupShape& group : shape.kv_groups) {
    EXPECT_EQ(group.bytes_per_block, 2 * 2 * 8 * 16 * 4) << "K and V · heads · head_dim · tokens · f32";
  }
  const Plan& plan = engine.plan();
  ASSERT_EQ(plan.ops.size(), 12u);
  const auto& qkv = std::get<NormQkvRopeOp>(plan.ops[1]);
  EXPECT_EQ(plan.linears[qkv.linear].n, 64);
  EXPECT_EQ(plan.linears[qkv.linear].panels, 4);
  EXPECT_EQ(plan.linears[qkv.linear].segments[2].row_begin, 48);
  EXPECT_EQ(std::get<PagedAttentionOp>(plan.ops[7]).window, 5);
}

TEST(Engine, BytesOfAKvBlockFollowItsType) {
  const struct {
    const char* dtype;
    std::int64_t head_bytes;  ///< K of 16 tokens, head_dim 8
  } cases[] = {{"f32", 16 * 8 * 4}, {"bf16", 16 * 8 * 2}, {"int16", 16 * (8 * 2 + 4)}, {"int8", 16 * (8 + 4)}};
  for (const auto& c : cases) {
    const TinyModel tiny({.kv_dtype = c.dtype});
    const Engine engine = Engine::from_bytes(tiny.engine_bytes(), "tiny.engine");
    ASSERT_EQ(engine.shape().kv_groups.size(), 1u);
    EXPECT_EQ(engine.shape().kv_groups[0].bytes_per_block, 2 * 2 * 2 * c.head_bytes) << c.dtype;
  }
}

TEST(Engine, AFloat16CacheOfOlderEnginesIsRefused) {
  const TinyModel tiny({.kv_dtype = "f16"});
  try {
    Engine::from_bytes(tiny.engine_bytes(), "tiny.engine");
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kEngineIncompatible);
    EXPECT_NE(std::string(e.what()).find("rebuild it"), std::string::npos) << e.what();
  }
}

TEST(Engine, LoadsFromAFile) {
  const auto path = std::filesystem::temp_directory_path() / ("aotllm_engine_test_" + std::to_string(::getpid()));
  const auto bytes = model().engine_bytes();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  EXPECT_EQ(Engine::load(path.string()).shape().vocab_size, 50);
  std::ofstream(path, std::ios::binary | std::ios::trunc).flush();
  EXPECT_THROW(Engine::load(path.string()), Error) << "an empty file";
  std::filesystem::remove(path);
  EXPECT_THROW(Engine::load(path.string()), Error) << "no file";
  EXPECT_THROW(Engine::load(std::filesystem::temp_directory_path().string()), Error) << "a folder";
}

struct Broken {
  const char* what;
  const char* anchor;
  const char* from;
  const char* to;
  const char* message;  ///< part of the error: place, expected, got
  ErrorKind kind = ErrorKind::kEngine;
};

constexpr Broken kBroken[] = {
    {"version", "", "\"version\": 1", "\"version\": 2", "plan.version: the engine needs plan version 2",
     ErrorKind::kEngineIncompatible},
    {"target", "", "\"cpu\"", "\"tensorrt\"", "plan.target: the engine needs target tensorrt",
     ErrorKind::kEngineIncompatible},
    {"unknown field", "", "\"version\"", "\"x\": 1, \"version\"", "plan: unknown field \"x\""},
    {"no tokens", "", "\"max_num_tokens\": 128", "\"max_num_tokens\": 0",
     "plan.max_num_tokens: expected an integer in [1,"},
    {"more tokens than the arena holds", "", "\"max_num_tokens\": 128", "\"max_num_tokens\": 129", "plan.buffers["},
    {"huge tokens", "", "\"max_num_tokens\": 128", "\"max_num_tokens\": 4611686018427387904", "plan.max_num_tokens"},
    {"arena too small", "", "\"arena_bytes\": 49152", "\"arena_bytes\": 49088", "within the arena of 49088 bytes"},
    {"arena larger than all buffers", "", "\"arena_bytes\": 49152", "\"arena_bytes\": 490000000", "plan.arena_bytes"},
    {"buffer offset unaligned", "", "\"offset\": 16384", "\"offset\": 16388",
     "buffers[1].offset: expected a multiple of 64"},
    {"buffer offset negative", "", "\"offset\": 16384", "\"offset\": -64", "buffers[1].offset: expected an integer"},
    {"buffer outside the arena", "", "\"offset\": 16384", "\"offset\": 49152", "buffers[1].offset"},
    {"buffer width zero", "\"hidden\", ", "\"width\": 32", "\"width\": 0", "buffers[0].width"},
    {"rope tensor missing", "", "\"inv_freq\": \"inv_freq\"", "\"inv_freq\": \"gone\"",
     "rope[0].inv_freq: expected the name"},
    {"rope tensor is no float", "", "\"inv_freq\": \"inv_freq\"", "\"inv_freq\": \"embedding\"", "rope[0].inv_freq"},
    {"rope longer than a head", "", "\"inv_freq\": \"inv_freq\"", "\"inv_freq\": \"layers.0.q_norm\"",
     "ops[1].rope: expected a table of at most 4 frequencies, got 8"},
    {"kv dtype", "\"kv\"", "\"f32\"", "\"f64\"", "kv.dtype: expected f32, bf16, int16 or int8, got \"f64\""},
    {"block size", "", "\"tokens_per_block\": 16", "\"tokens_per_block\": 24",
     "tokens_per_block: expected a multiple of 16"},
    {"block size zero", "", "\"tokens_per_block\": 16", "\"tokens_per_block\": 0", "tokens_per_block"},
    {"head size", "\"kv\"", "\"head_dim\": 8", "\"head_dim\": 12", "kv.layers[0].head_dim: expected a multiple of 8"},
    {"head size differs from the op", "\"kv\"", "\"head_dim\": 8", "\"head_dim\": 16", "ops[1].head_dim: expected"},
    {"kv heads differ from the op", "\"kv\"", "\"num_kv_heads\": 2", "\"num_kv_heads\": 4",
     "ops[1].num_kv_heads: expected"},
    {"window differs from the op", "\"kv\"", "\"window\": 5", "\"window\": 6", "ops[7].window: expected"},
    {"format unknown", "\"linears\"", "\"f32\"", "\"f33\"",
     "linears[\"embedding\"].segments[0].format: expected a format"},
    {"another format", "\"linears\"", "\"f32\"", "\"f16\"",
     "segments[0].tensor: expected a U8 tensor of 4096 bytes, got U8"},
    {"block format", "\"layers.0.o\"", "\"f32\"", "\"q4_k\"",
     "linears[\"layers.0.o\"].segments[0].tensor: expected a U8"},
    {"k no multiple of 32", "\"layers.0.down\"", "\"f32\"", "\"q4_0\"", "format: expected a float format"},
    {"segment larger than its tensor", "\"layers.0.qkv\"", "\"n\": 32", "\"n\": 33",
     "linears[\"layers.0.qkv\"].segments[0].tensor: expected a U8 tensor"},
    {"rows differ from the segments", "\"layers.0.qkv\"", "\"n\": 64", "\"n\": 63", "qkv\"].n: expected 64"},
    {"no segments", "\"layers.0.o\"", "[{\"n\": 32, \"format\": \"f32\", \"tensor\": \"layers.0.o\"}]", "[]",
     "n: expected 0"},
    {"k differs from the tensor", "\"layers.0.o\"", "\"k\": 32", "\"k\": 34",
     "linears[\"layers.0.o\"].segments[0].tensor"},
    {"segment tensor missing", "\"layers.0.o\"", "\"tensor\": \"layers.0.o\"", "\"tensor\": \"gone\"",
     "name of a tensor"},
    {"segment tensor is float", "\"layers.0.o\"", "\"tensor\": \"layers.0.o\"", "\"tensor\": \"final_norm\"",
     "got F32"},
    {"unknown op", "", "\"op\": \"norm_swiglu\"", "\"op\": \"norm_router\"",
     "ops[4].op: expected an op of this runtime"},
    {"unknown op field", "norm_swiglu", "\"gate_bias\"", "\"gatebias\"", "ops[4]: unknown field \"gatebias\""},
    {"missing op field", "norm_swiglu", "\"eps\": 1e-5, ", "", "ops[4]: the field \"eps\" is missing"},
    {"eps zero", "norm_swiglu", "\"eps\": 1e-5", "\"eps\": 0", "ops[4].eps: expected a number in"},
    {"activation", "", "\"silu\"", "\"relu\"", "ops[4].activation: expected silu or gelu_tanh, got \"relu\""},
    {"buffer index", "embedding\", \"out", "\"out\": 0", "\"out\": 4",
     "ops[0].out: expected an integer in [0, 3], got 4"},
    {"embedding width", "embedding\", \"out", "\"out\": 0", "\"out\": 3", "ops[0].out: expected a buffer of width 32"},
    {"embedding rows", "embedding\", \"out", "\"linear\": \"embedding\"", "\"linear\": \"layers.0.o\"",
     "ops[0].linear: expected a linear with n = 50, got \"layers.0.o\" with n = 32"},
    {"linear unknown", "", "\"linear\": \"layers.0.qkv\"", "\"linear\": \"x\"",
     "ops[1].linear: expected the name of a linear"},
    {"linear columns", "linear_residual\", \"in\": 3", "\"layers.0.down\"", "\"layers.0.o\"",
     "ops[5].linear: expected a linear with k = 48, the width of \"mlp\", got \"layers.0.o\" with k = 32"},
    {"qkv rows", "", "\"linear\": \"layers.0.qkv\"", "\"linear\": \"layers.0.o\"",
     "ops[1].linear: expected a linear with n = 64"},
    {"query heads", "\"op\": \"norm_qkv_rope\"", "\"num_heads\": 4", "\"num_heads\": 3",
     "num_heads: expected a multiple"},
    {"query width", "\"op\": \"norm_qkv_rope\"", "\"num_heads\": 4", "\"num_heads\": 6",
     "ops[1].out: expected a buffer"},
    {"layer", "\"op\": \"norm_qkv_rope\"", "\"layer\": 0", "\"layer\": 2",
     "ops[1].layer: expected an integer in [0, 1]"},
    {"rope index", "", "\"rope\": 0", "\"rope\": 1", "ops[1].rope: expected an integer in [0, 0], got 1"},
    {"norm size", "\"op\": \"norm_qkv_rope\"", "\"layers.0.attn_norm\"", "\"layers.0.q_norm\"",
     "ops[1].norm: expected an F32"},
    {"bias size", "\"op\": \"norm_qkv_rope\"", "\"layers.0.qkv.bias\"", "\"layers.0.o.bias\"",
     "ops[1].bias: expected an F32"},
    {"head norm size", "", "\"q_norm\": \"layers.0.q_norm\"", "\"q_norm\": \"final_norm\"",
     "ops[1].q_norm: expected an F32"},
    {"attention width", "paged_attention", "\"in\": 1", "\"in\": 3", "ops[2].in: expected a buffer of width 32, got 3"},
    {"softcap negative", "paged_attention", "\"softcap\": 0", "\"softcap\": -1",
     "ops[2].softcap: expected a number in [0,"},
    {"residual width", "linear_residual", "\"residual\": 0", "\"residual\": 3",
     "ops[3].residual: expected a buffer of width 32"},
    {"post norm without eps", "post_attn", ", \"eps\": 1e-5", "", "ops[3]: the field \"eps\" is missing"},
    {"gate rows", "", "\"gate\": \"layers.0.gate\"", "\"gate\": \"layers.0.o\"",
     "ops[4].gate: expected a linear with n = 48"},
    {"vocabulary", "lm_head", "\"vocab_size\": 50", "\"vocab_size\": 51",
     "ops[11].vocab_size: expected an integer in [50, 50]"},
    {"input not written", "paged_attention", "\"in\": 1, \"out\": 2", "\"in\": 2, \"out\": 1",
     "\"attention\", which holds nothing"},
    {"input overwritten", "norm_swiglu", "\"in\": 0, \"out\": 3", "\"in\": 0, \"out\": 0", "ops[4].gate"},
    {"output over input", "\"linear_residual\", \"in\": 2", "\"residual\": 0, \"out\": 0",
     "\"residual\": 0, \"out\": 2", "writes buffer \"attention\" over its input \"attention\""},
    {"bytes reused since", "\"linear_residual\", \"in\": 3", "\"residual\": 0", "\"residual\": 1",
     "\"q\", which holds nothing"},
    {"two embeddings", "", "\"op\": \"lm_head\"", "\"op\": \"embedding\"", "ops[11]: unknown field"},
    {"layer written twice",
     "\"op\": \"norm_qkv_rope\", \"in\": 0, \"out\": 1, \"eps\": 1e-5, \"rope\": 0, \"layer\": 1", "\"layer\": 1",
     "\"layer\": 0", "layer 0 writes its keys and values twice"},
    {"rank beyond the size", "", "\"version\"", "\"tp\": {\"size\": 2, \"rank\": 2}, \"version\"",
     "plan.tp.rank: expected an integer in [0, 1], got 2"},
    {"more ranks than tokens", "", "\"version\"", "\"tp\": {\"size\": 51, \"rank\": 0}, \"version\"",
     "plan.vocab_size: expected a token for each of 51 ranks"},
    {"rows of another rank", "", "\"version\"", "\"tp\": {\"size\": 2, \"rank\": 0}, \"version\"",
     "ops[0].linear: expected a linear with n = 25"},
    {"first token of a rank", "embedding\", \"out", "\"scale\"", "\"vocab_begin\": 1, \"scale\"",
     "ops[0].vocab_begin: expected an integer in [0, 0], got 1"},
    {"stage beyond the size", "", "\"version\"", "\"pp\": {\"size\": 2, \"rank\": 2, \"layers\": [0, 1]}, \"version\"",
     "plan.pp.rank: expected an integer in [0, 1], got 2"},
    {"stage without layers", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [1, 1], \"leaving\": 0}, \"version\"",
     "plan.pp.layers[0]: expected an integer in [0, 0], got 1"},
    {"layers beyond the model", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [0, 3], \"leaving\": 0}, \"version\"",
     "plan.pp.layers[1]: expected an integer in [1, 2], got 3"},
    {"stage that hands on nothing", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [0, 1]}, \"version\"",
     "plan.pp: the field \"leaving\" is missing"},
    {"last stage that hands on", "", "\"version\"",
     "\"pp\": {\"size\": 1, \"rank\": 0, \"layers\": [0, 2], \"leaving\": 0}, \"version\"",
     "plan.pp.leaving: expected no buffer at this end of the pipeline"},
    {"width of what is handed on", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [0, 1], \"leaving\": 3}, \"version\"",
     "plan.pp.leaving: expected a buffer of width 32"},
    {"layer of another stage", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [0, 1], \"leaving\": 0}, \"version\"",
     "ops[6].layer: expected an integer in [0, 0], got 1"},
    {"embedding on a later stage", "", "\"version\"",
     "\"pp\": {\"size\": 2, \"rank\": 1, \"layers\": [0, 2], \"entering\": 0}, \"version\"",
     "ops[0]: the first op, and no other, is an embedding, on the first stage only"},
    {"null where a value must be", "norm_swiglu", "\"layers.0.mlp_norm\"", "null",
     "ops[4].norm: expected the name of a tensor in the file, got null"},
};

TEST(Plan, EachBrokenRuleIsNamed) {
  for (const Broken& c : kBroken) {
    try {
      Engine::from_bytes(model().engine_bytes(edited(c.anchor, c.from, c.to)), "tiny.engine");
      ADD_FAILURE() << c.what << ": accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), c.kind) << c.what;
      EXPECT_NE(std::string(error.what()).find(c.message), std::string::npos) << c.what << " → " << error.what();
      EXPECT_EQ(std::string(error.what()).rfind("tiny.engine: ", 0), 0u) << error.what();
    }
  }
}

constexpr Broken kBrokenExperts[] = {
    {"more experts taken than there are", "norm_moe", "\"top_k\": 2", "\"top_k\": 5",
     "ops[4].top_k: expected an integer in [1, 4], got 5"},
    {"none taken", "norm_moe", "\"top_k\": 2", "\"top_k\": 0", "ops[4].top_k: expected an integer in [1, 4], got 0"},
    {"no experts", "norm_moe", "\"num_experts\": 4", "\"num_experts\": 0",
     "ops[4].num_experts: expected an integer in [1, 1024], got 0"},
    {"experts beyond reason", "norm_moe", "\"num_experts\": 4", "\"num_experts\": 1000000000", "ops[4].num_experts"},
    {"another number of experts", "norm_moe", "\"num_experts\": 4", "\"num_experts\": 3",
     "ops[4].router: expected an F32 tensor of shape [3, 32], got layers.0.router, F32 of 512 bytes"},
    {"router missing", "norm_moe", "\"layers.0.router\"", "\"gone\"", "ops[4].router: expected the name of a tensor"},
    {"router a vector", "norm_moe", "\"layers.0.router\"", "\"final_norm\"", "ops[4].router: expected an F32 tensor"},
    {"gate missing", "norm_moe", ", \"gate\": \"layers.0.experts.gate\"", "", "the field \"gate\" is missing"},
    {"down unknown", "norm_moe", "\"layers.0.experts.down\"", "\"gone\"", "ops[4].down: expected the name of a linear"},
    {"a linear of another shape", "norm_moe", "\"layers.0.experts.up\"", "\"layers.0.o\"",
     "ops[4].up: expected a linear with n = 192, got \"layers.0.o\" with n = 32"},
    {"experts that cannot be told apart", "norm_moe", "\"layers.0.experts.gate\"", "\"embedding\"",
     "ops[4].gate: expected a linear whose n is a multiple of 4, got n = 50"},
    {"one segment for all experts", "norm_moe", "\"layers.0.experts.gate\"", "\"layers.0.o\"",
     "ops[4].gate: expected a linear of 4 segments, one per expert, got \"layers.0.o\" of 1"},
    {"columns of down", "norm_moe", "\"layers.0.experts.down\"", "\"layers.0.experts.up\"",
     "ops[4].down: expected a linear with k = 48"},
    {"normalize a number", "norm_moe", "\"normalize\": false", "\"normalize\": 1", "ops[4].normalize: expected"},
    {"activation", "norm_moe", "\"silu\"", "\"relu\"", "ops[4].activation: expected silu or gelu_tanh"},
    {"unknown field", "norm_moe", "\"gate\"", "\"gate_up\"", "ops[4]: unknown field \"gate_up\""},
    {"out over the input", "norm_moe", "\"out\": 4", "\"out\": 0", "ops[4]: writes buffer \"hidden\" over its input"},
    {"out of another width", "norm_moe", "\"out\": 4", "\"out\": 3", "ops[4].out: expected a buffer of width 32"},
    {"residual of another width", "norm_moe", "\"residual\": 0", "\"residual\": 3", "ops[4].residual: expected"},
    {"residual that holds nothing", "norm_moe", "\"residual\": 0", "\"residual\": 4",
     "ops[4]: reads buffer \"second\""},
    {"experts of unequal size", "\"layers.0.experts.gate\"",
     "\"n\": 48, \"format\": \"f32\", \"tensor\": \"layers.0.experts.1",
     "\"n\": 47, \"format\": \"f32\", \"tensor\": \"layers.0.experts.1", "n: expected 191, the rows of the segments"},
};

TEST(Plan, BrokenExpertsAreNamed) {
  const TinyModel tiny({.experts = 4, .top_k = 2});
  EXPECT_EQ(std::get<NormMoeOp>(Engine::from_bytes(tiny.engine_bytes(), "tiny.engine").plan().ops[4]).neurons, 48);
  for (const Broken& c : kBrokenExperts) {
    std::string plan = tiny.plan();
    const auto at = plan.find(c.from, plan.find(c.anchor));
    ASSERT_NE(at, std::string::npos) << c.what;
    try {
      Engine::from_bytes(tiny.engine_bytes(plan.replace(at, std::string(c.from).size(), c.to)), "tiny.engine");
      ADD_FAILURE() << c.what << ": accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), c.kind) << c.what;
      EXPECT_NE(std::string(error.what()).find(c.message), std::string::npos) << c.what << " → " << error.what();
    }
  }
}

/// The valid plan with line `line` (an op, its comma included) removed.
std::string without_op(const std::string& begin) {
  std::string plan = model().plan();
  const auto at = plan.find(begin);
  const auto end = plan.find('\n', at);
  return plan.erase(at, end - at + 1);
}

TEST(Plan, OrderOfOpsIsChecked) {
  const auto message = [](const std::string& plan) -> std::string {
    try {
      Engine::from_bytes(model().engine_bytes(plan), "tiny.engine");
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(message(without_op("{\"op\": \"embedding\"")).find("the first op, and no other"), std::string::npos);
  const std::string leaving = "\"pp\": {\"size\": 2, \"rank\": 0, \"layers\": [0, 2], \"leaving\": 0}, ";
  EXPECT_NE(message(edited("", "\"version\"", leaving + "\"version\"")).find("the last op, and no other"),
            std::string::npos);
  EXPECT_NE(message(without_op("{\"op\": \"norm_qkv_rope\"")).find("ops[1]: "), std::string::npos);
  EXPECT_NE(message(without_op("{\"op\": \"paged_attention\"")).find("ops[2]: reads buffer \"attention\""),
            std::string::npos);
  std::string empty = model().plan();
  empty.erase(empty.find("\"ops\": [") + 8);
  EXPECT_NE(message(empty + "]}").find("got no ops"), std::string::npos);
}

/// Every byte of the header is changed once: the loader refuses the file, or what it accepts runs within its memory
/// (which the sanitizers watch).
void change_every_byte(const TinySpec& spec) {
  const TinyModel small(spec);
  const auto original = small.engine_bytes();
  std::uint64_t header = 0;
  std::memcpy(&header, original.data(), 8);
  const std::vector<TokenId> tokens = {0, 1, 2};
  const std::vector<BlockId> blocks = {0};
  int accepted = 0;
  for (std::size_t at = 0; at < 8 + header; ++at) {
    for (const int flip : {1, 2, 16}) {
      auto bytes = original;
      bytes[at] ^= static_cast<std::uint8_t>(flip);
      try {
        CpuRunner runner(Engine::from_bytes(bytes, "flipped"), {1, nullptr});
        runner.allocate_kv({.device_blocks = {1, 1, 1, 1}});
        StepOutputs outputs;
        runner.step(std::vector<SequenceStep>{{tokens, 0, {blocks, blocks}, LogitsMode::kAll}}, outputs);
        ++accepted;
      } catch (const Error&) {
      }
    }
  }
  EXPECT_GT(accepted, 0) << "some changes (a buffer's name, an eps) are harmless";
}

TEST(Engine, NoChangedByteCrashes) {
  change_every_byte({.vocab = 17, .layers = 1, .max_seq_len = 16, .max_num_tokens = 4});
}

TEST(Engine, NoChangedByteOfAMixtureOfExpertsCrashes) {
  change_every_byte(
      {.vocab = 17, .layers = 1, .max_seq_len = 16, .max_num_tokens = 4, .experts = 3, .top_k = 2, .normalize = true});
}

}  // namespace
}  // namespace aotllm
