#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "tiny_model.h"

// Sequences that a runner of target cpu runs without a manager.

namespace aotllm::testing_support {

/// The same number for each group, none on the host.
inline KvAllocation device_blocks(std::int32_t count) {
  return {.device_blocks = {count, count, count, count}};
}

inline CpuRunner make_runner(const TinyModel& model, int num_threads, int num_blocks = 128) {
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {num_threads, nullptr});
  runner.allocate_kv(device_blocks(num_blocks));
  return runner;
}

/// The same table for each group.
inline std::array<std::span<const BlockId>, kMaxKvGroups> tables(std::span<const BlockId> blocks) {
  return {blocks, blocks, blocks, blocks};
}

inline std::vector<TokenId> random_tokens(int count, int vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = static_cast<TokenId>(random() % vocab);
  return tokens;
}

/// A sequence and its blocks, run chunk by chunk; collects the logits of every token.
struct Sequence {
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
  int done = 0;
  std::vector<float> logits = {};

  bool finished() const { return done == static_cast<int>(tokens.size()); }
  SequenceStep next(int chunk) const {
    const auto count = std::min<std::size_t>(chunk, tokens.size() - done);
    return {std::span(tokens).subspan(done, count), done, tables(blocks), LogitsMode::kAll};
  }
};

/// Runs the sequences side by side in steps of `chunk` tokens each.
inline void run_all(CpuRunner& runner, std::vector<Sequence*> sequences, int chunk) {
  StepOutputs outputs;
  for (;;) {
    std::erase_if(sequences, [](const Sequence* s) { return s->finished(); });
    if (sequences.empty()) return;
    std::vector<SequenceStep> steps;
    for (const Sequence* s : sequences) steps.push_back(s->next(chunk));
    runner.step(steps, outputs);
    int row = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      for (std::size_t t = 0; t < steps[i].tokens.size(); ++t, ++row) {
        const auto logits = outputs.row(row);
        sequences[i]->logits.insert(sequences[i]->logits.end(), logits.begin(), logits.end());
      }
      sequences[i]->done += static_cast<int>(steps[i].tokens.size());
    }
    ASSERT_EQ(row, outputs.rows());
  }
}

inline std::vector<float> logits_of(CpuRunner& runner, const std::vector<TokenId>& tokens, int chunk) {
  Sequence sequence{tokens, {3, 2, 9, 0, 7, 5, 8, 1}};
  run_all(runner, {&sequence}, chunk);
  return sequence.logits;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace aotllm::testing_support
