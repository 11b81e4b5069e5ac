#include "aotllm/cpu_runner.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "cpu_sequences.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using testing_support::device_blocks;
using testing_support::logits_of;
using testing_support::make_runner;
using testing_support::random_tokens;
using testing_support::run_all;
using testing_support::same_bits;
using testing_support::Sequence;
using testing_support::tables;
using testing_support::TinyModel;

TEST(CpuRunner, BrokenSetUpThrows) {
  const TinyModel model({});
  const auto engine = [&] { return Engine::from_bytes(model.engine_bytes(), "tiny.engine"); };
  EXPECT_THROW(CpuRunner(engine(), {-1, nullptr}), Error);
  EXPECT_THROW(CpuRunner(engine(), {1 << 20, nullptr}), Error);
  CpuRunner runner(engine(), {1, nullptr});
  StepOutputs outputs;
  const std::vector<TokenId> tokens = {1};
  const std::vector<BlockId> blocks = {0};
  EXPECT_THROW(runner.step(std::vector<SequenceStep>{{tokens, 0, {blocks}}}, outputs), Error) << "no KV memory yet";
  EXPECT_THROW(runner.allocate_kv(device_blocks(0)), Error);
  EXPECT_THROW(runner.allocate_kv(device_blocks(INT32_MAX)), Error) << "2^43 bytes";
  EXPECT_THROW(runner.allocate_kv({.device_blocks = {1}, .host_blocks = {-1}}), Error);
  EXPECT_THROW(runner.allocate_kv({.device_blocks = {1}, .host_blocks = {INT32_MAX}}), Error) << "2^43 bytes";
  EXPECT_EQ(runner.kv_allocation().device_blocks, BlockCounts{});
  runner.allocate_kv({.device_blocks = {2, 7}, .host_blocks = {3}});
  EXPECT_EQ(runner.kv_allocation().device_blocks, BlockCounts{2}) << "the engine has one group";
  EXPECT_EQ(runner.kv_allocation().host_blocks, BlockCounts{3});
  EXPECT_THROW(runner.allocate_kv(device_blocks(2)), Error);

  CpuRunner two_groups(Engine::from_bytes(TinyModel({.window = 5}).engine_bytes(), "tiny.engine"), {1, nullptr});
  EXPECT_THROW(two_groups.allocate_kv({.device_blocks = {1, 0}}), Error) << "every group needs a block";
}

TEST(CpuRunner, CopiesOutOfRangeThrowAndCopyNothing) {
  const TinyModel model({.window = 20});
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {1, nullptr});
  runner.allocate_kv({.device_blocks = {4, 2}, .host_blocks = {1, 0}});
  const auto device = KvTier::kDevice;
  const auto host = KvTier::kHost;
  const struct {
    BlockCopy copy;
    const char* reason;
  } broken[] = {
      {{-1, device, 0, device, 1}, "expected a KV group in [0, 2), got -1"},
      {{2, device, 0, device, 1}, "expected a KV group in [0, 2), got 2"},
      {{0, device, 4, device, 1}, "expected device ids in [0, 4) of KV group 0, got 4"},
      {{0, device, 1, device, -1}, "expected device ids in [0, 4) of KV group 0, got -1"},
      {{1, device, 1, device, 2}, "expected device ids in [0, 2) of KV group 1, got 2"},
      {{0, host, 1, device, 0}, "expected host ids in [0, 1) of KV group 0, got 1"},
      {{1, device, 0, host, 0}, "expected host ids in [0, 0) of KV group 1, got 0"},
  };
  const auto tokens = random_tokens(16, model.spec.vocab, 9);
  const std::vector<BlockId> blocks = {0, 1};
  const std::vector<SequenceStep> prompt = {{tokens, 0, tables(blocks), LogitsMode::kNone}};
  const std::vector<SequenceStep> decode = {{std::span(tokens).first(1), 16, tables(blocks), LogitsMode::kLast}};
  StepOutputs outputs;
  runner.step(prompt, outputs);
  runner.step(decode, outputs);
  const auto expected = outputs.logits;
  for (const auto& c : broken) {
    try {
      runner.copy_blocks(std::vector<BlockCopy>{{0, device, 3, device, 0}, c.copy});
      ADD_FAILURE() << "accepted: " << c.reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find(c.reason), std::string::npos) << error.what();
    }
  }
  runner.step(decode, outputs);
  EXPECT_TRUE(same_bits(outputs.logits, expected)) << "block 0 is as it was";
}

TEST(CpuRunner, CopiedBlockServesAnotherSequence) {
  const TinyModel model({.window = 20});
  CpuRunner runner = make_runner(model, 2);
  const auto prefix = random_tokens(20, model.spec.vocab, 5);
  auto longer = prefix;
  for (const TokenId t : random_tokens(15, model.spec.vocab, 6)) longer.push_back(t);
  const auto expected = logits_of(runner, longer, 128);

  Sequence first{prefix, {10, 11}};
  run_all(runner, {&first}, 128);
  const auto device = KvTier::kDevice;
  runner.copy_blocks(
      std::vector<BlockCopy>{{0, device, 11, device, 12}, {1, device, 11, device, 12}});  // 4 of 16 tokens
  Sequence other{random_tokens(30, model.spec.vocab, 7), {10, 11}, 20};
  run_all(runner, {&other}, 128);  // overwrites what follows in the original
  Sequence second{longer, {10, 12, 13}, 20};
  run_all(runner, {&second}, 128);
  const auto offset = static_cast<std::ptrdiff_t>(20) * model.spec.vocab;
  EXPECT_TRUE(same_bits(second.logits, {expected.begin() + offset, expected.end()}));
}

TEST(CpuRunner, BlocksComeBackFromTheHost) {
  const TinyModel model({.window = 16});
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {2, nullptr});
  runner.allocate_kv({.device_blocks = {6, 6}, .host_blocks = {2, 1}});
  const auto tokens = random_tokens(48, model.spec.vocab, 5);
  Sequence whole{tokens, {0, 1, 2}};
  run_all(runner, {&whole}, 128);

  const auto device = KvTier::kDevice;
  const auto host = KvTier::kHost;
  runner.copy_blocks(std::vector<BlockCopy>{{0, device, 0, host, 1}, {0, device, 1, host, 0}, {1, device, 1, host, 0}});
  Sequence other{random_tokens(48, model.spec.vocab, 6), {0, 1, 2}};
  run_all(runner, {&other}, 128);
  runner.copy_blocks(std::vector<BlockCopy>{{0, host, 1, device, 4}, {0, host, 0, device, 3}, {1, host, 0, device, 4}});

  const std::vector<BlockId> all = {4, 3, 5};
  const std::vector<BlockId> in_window = {kNoBlock, 4, 5};  // position 32 sees 17 to 32
  const SequenceStep step{std::span(tokens).subspan(32), 32, {all, in_window}, LogitsMode::kAll};
  StepOutputs outputs;
  runner.step({&step, 1}, outputs);
  const auto offset = static_cast<std::ptrdiff_t>(32) * model.spec.vocab;
  EXPECT_TRUE(same_bits(outputs.logits, {whole.logits.begin() + offset, whole.logits.end()}));
}

}  // namespace
}  // namespace aotllm
