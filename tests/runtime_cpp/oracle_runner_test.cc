#include "runner/oracle_runner.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "aotllm/adapter.h"
#include "error_kind_of.h"
#include "fake_runner.h"

namespace aotllm {
namespace {

OracleRunner oracle(std::vector<TokenId> spoken = {}) {
  OracleRunner runner({.shape = testing::small_shape(), .spoken_tokens = std::move(spoken)});
  runner.allocate_kv({.device_blocks = {8}});
  return runner;
}

SequenceStep sequence(const std::vector<TokenId>& tokens, std::int32_t start, const std::vector<BlockId>& blocks,
                      LogitsMode logits, AdapterId adapter = 0) {
  SequenceStep step{.tokens = tokens, .start_position = start, .logits = logits, .adapter = adapter};
  step.block_tables[0] = blocks;
  return step;
}

TEST(OracleRunner, LogitsPointAtTheNextToken) {
  OracleRunner runner = oracle();
  const std::vector<TokenId> first = {3, 9, 4};
  const std::vector<TokenId> second = {7};
  const std::vector<BlockId> blocks = {2, 5};
  const std::array steps = {sequence(first, 4, blocks, LogitsMode::kAll),
                            sequence(second, 0, blocks, LogitsMode::kNone),
                            sequence(second, 6, blocks, LogitsMode::kLast, 3)};
  StepOutputs outputs;
  runner.step(steps, outputs);
  ASSERT_EQ(outputs.rows(), 4);
  const std::array expected = {runner.next_token(3, 4), runner.next_token(9, 5), runner.next_token(4, 6),
                               runner.next_token(7, 6, 3)};
  for (std::int32_t row = 0; row < 4; ++row) {
    std::vector<float> logits(37, 0.0F);
    logits[static_cast<std::size_t>(expected[static_cast<std::size_t>(row)])] = 100.0F;
    EXPECT_EQ(std::vector(outputs.row(row).begin(), outputs.row(row).end()), logits) << "row " << row;
  }
}

TEST(OracleRunner, SaysSpokenTokensOnlyAndAllOfThem) {
  const OracleRunner runner = oracle({5, 6, 30});
  std::set<TokenId> said;
  for (TokenId token = 0; token < 37; ++token) {
    for (std::int32_t position = 0; position < 48; ++position) said.insert(runner.next_token(token, position));
  }
  EXPECT_EQ(said, (std::set<TokenId>{5, 6, 30}));
}

TEST(OracleRunner, RefusesWhatTheContractForbids) {
  OracleRunner runner = oracle();
  StepOutputs outputs;
  const std::vector<TokenId> tokens = {1, 2, 3, 4, 5};
  const std::vector<TokenId> unknown = {37};
  const std::vector<BlockId> one_block = {0};
  const std::vector<BlockId> no_such_block = {0, 8};
  for (const SequenceStep& step :
       {sequence(tokens, 0, one_block, LogitsMode::kLast), sequence(tokens, 0, no_such_block, LogitsMode::kLast),
        sequence(unknown, 0, one_block, LogitsMode::kLast), sequence(tokens, 44, one_block, LogitsMode::kLast)}) {
    EXPECT_EQ(testing::error_kind_of([&] { runner.step(std::span(&step, 1), outputs); }), ErrorKind::kInternal);
  }
  const BlockCopy copy{.from = 1, .to = 8};
  EXPECT_EQ(testing::error_kind_of([&] { runner.copy_blocks(std::span(&copy, 1)); }), ErrorKind::kInternal);
  runner.load_adapter(2, Adapter{});
  EXPECT_EQ(testing::error_kind_of([&] { runner.load_adapter(2, Adapter{}); }), ErrorKind::kInternal);
  runner.unload_adapter(2);
  EXPECT_EQ(testing::error_kind_of([&] { runner.unload_adapter(2); }), ErrorKind::kInternal);
}

TEST(OracleRunner, OptionsAreChecked) {
  const std::vector<std::pair<const char*, std::function<void(OracleOptions&)>>> cases = {
      {"vocab_size", [](OracleOptions& o) { o.shape.vocab_size = 0; }},
      {"max_seq_len", [](OracleOptions& o) { o.shape.max_seq_len = 1; }},
      {"max_batch_size", [](OracleOptions& o) { o.shape.max_batch_size = 0; }},
      {"max_num_tokens", [](OracleOptions& o) { o.shape.max_num_tokens = 7; }},
      {"tokens_per_block", [](OracleOptions& o) { o.shape.tokens_per_block = 0; }},
      {"kv_windows", [](OracleOptions& o) { o.shape.kv_groups.clear(); }},
      {"kv_windows", [](OracleOptions& o) { o.shape.kv_groups = {{8, 1}, {16, 1}}; }},
      {"kv_windows", [](OracleOptions& o) { o.shape.kv_groups = {{8, 1}, {0, 1}}; }},
      {"spoken_tokens", [](OracleOptions& o) { o.spoken_tokens = {37}; }},
      {"step_seconds", [](OracleOptions& o) { o.step_seconds = std::numeric_limits<double>::quiet_NaN(); }}};
  for (const auto& [param, change] : cases) {
    OracleOptions options{.shape = testing::small_shape(), .spoken_tokens = {}};
    change(options);
    try {
      const OracleRunner runner(options);
      ADD_FAILURE() << param << " was not refused";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
      EXPECT_EQ(e.param(), param);
    }
  }
}

}  // namespace
}  // namespace aotllm
