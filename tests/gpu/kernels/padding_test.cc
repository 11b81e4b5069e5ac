#include "runner/cuda/padding.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "attention/attention.h"
#include "runner/cuda/buckets.h"

namespace aotllm::cuda {
namespace {

constexpr int kHeadRows = 64;

ModelShape model_of(int max_batch_size, int max_num_tokens, int max_seq_len) {
  return {.vocab_size = 512,
          .num_layers = 1,
          .max_seq_len = max_seq_len,
          .max_num_tokens = max_num_tokens,
          .max_batch_size = max_batch_size,
          .tokens_per_block = 64,
          .kv_groups = {{.window = 0, .bytes_per_block = 64}}};
}

/// A step of single tokens and longer sequences, as StepData::shape_of says it.
StepShape random_shape(const ModelShape& model, std::mt19937& random) {
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  StepShape shape;
  const int wanted = up_to(model.max_batch_size);
  const int longest = up_to(model.max_num_tokens);
  while (shape.sequences < wanted && shape.rows < model.max_num_tokens) {
    const int rows = up_to(2) == 1 ? 1 : std::min(up_to(longest), model.max_num_tokens - shape.rows);
    const int end = std::min(rows + up_to(model.max_seq_len), model.max_seq_len);
    shape.rows += rows;
    ++shape.sequences;
    shape.table_blocks = std::max(shape.table_blocks, (end + 63) / 64);
    if (rows == 1) {
      ++shape.num_queries;
      shape.max_context = std::max(shape.max_context, end);
    } else {
      shape.num_tiles += (rows + kContextTileRows - 1) / kContextTileRows;
    }
  }
  shape.sampled = std::min(up_to(shape.sequences), kHeadRows);
  shape.greedy = up_to(2) == 1;
  shape.late = up_to(2) == 1;
  return shape;
}

bool holds(const StepShape& outer, const StepShape& inner) {
  return outer.rows >= inner.rows && outer.num_queries >= inner.num_queries && outer.num_tiles >= inner.num_tiles &&
         outer.max_context >= inner.max_context && outer.sequences >= inner.sequences &&
         outer.table_blocks >= inner.table_blocks && outer.sampled >= inner.sampled;
}

TEST(Padding, HoldsTheStepAndFitsWhatIsReserved) {
  std::mt19937 random(7);
  for (const auto& [batch, tokens, length] :
       {std::tuple{1, 16, 64}, {200, 300, 1000}, {256, 8192, 8001}, {9, 9, 512}}) {
    const ModelShape model = model_of(batch, tokens, length);
    const StepShape most = largest_shape(model);
    for (int i = 0; i < 3000; ++i) {
      const StepShape shape = random_shape(model, random);
      const StepShape padded = padded_shape(shape, model, kHeadRows);
      EXPECT_TRUE(holds(padded, shape) && holds(most, padded));
      EXPECT_EQ(graph_part(padded), graph_part(shape));
      EXPECT_LE(padded.rows, (tokens + kDeviceRowStep - 1) / kDeviceRowStep * kDeviceRowStep);
      EXPECT_LE(padded.num_queries, batch_bucket(std::min(batch, tokens)));  // those that decode has scratch for
      EXPECT_EQ(padded.num_queries == 0, shape.num_queries == 0);
      EXPECT_EQ(padded.num_tiles == 0, shape.num_tiles == 0);
    }
  }
}

TEST(Padding, LongStepsKeepTheirRows) {
  const ModelShape model = model_of(256, 8192, 8001);
  StepShape shape{.rows = 4000, .num_tiles = 32, .sequences = 1, .table_blocks = 63};
  EXPECT_EQ(graph_part(shape), GraphPart::kNone);
  EXPECT_EQ(padded_shape(shape, model, kHeadRows), shape);
}

/// Layers read nothing of what is sampled, and a serving engine's steps fall into few shapes.
TEST(Padding, StepsWithPromptsShareGraphs) {
  const ModelShape model = model_of(256, 2048, 2048);
  StepShape shape{.rows = 700,
                  .num_queries = 70,
                  .num_tiles = 5,
                  .max_context = 900,
                  .sequences = 75,
                  .table_blocks = 15,
                  .sampled = 71};
  const StepShape key = graph_key(padded_shape(shape, model, kHeadRows));
  shape.rows = 760;
  shape.num_queries = 100;
  shape.num_tiles = 7;
  shape.max_context = 514;
  shape.sequences = 103;
  shape.table_blocks = 10;
  shape.sampled = 102;
  shape.greedy = false;
  shape.late = true;
  EXPECT_EQ(graph_key(padded_shape(shape, model, kHeadRows)), key);

  std::mt19937 random(3);
  std::set<StepShape> keys;
  for (int i = 0; i < 20000; ++i) {
    const int queries = std::uniform_int_distribution<int>(64, 128)(random);
    const int prompt = std::uniform_int_distribution<int>(17, 900)(random);
    keys.insert(graph_key(padded_shape({.rows = queries + prompt,
                                        .num_queries = queries,
                                        .num_tiles = (prompt + kContextTileRows - 1) / kContextTileRows,
                                        .max_context = 1000,
                                        .sequences = queries + 1,
                                        .table_blocks = 16,
                                        .sampled = queries + 1},
                                       model, kHeadRows)));
  }
  EXPECT_LE(keys.size(), 64U);
}

}  // namespace
}  // namespace aotllm::cuda
