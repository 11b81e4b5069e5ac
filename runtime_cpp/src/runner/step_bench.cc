#include "runner/step_bench.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "engine/plan.h"

namespace aotllm {
namespace {

using Clock = std::chrono::steady_clock;

/// Tokens before that of a sequence of many.
constexpr int kDepth = 64;
/// Of a measurement, at least.
constexpr double kLeastSeconds = 0.01;
constexpr int kMostRepeats = 16;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int most_rows(const ModelShape& shape, int most) {
  return std::min({most, shape.max_num_tokens, std::max(shape.max_batch_size, shape.max_seq_len)});
}

}  // namespace

StepBench::StepBench(std::vector<Engine> ranks, int num_threads, int most)
    : tp_(ranks.front().plan().tp_size), runner_(std::move(ranks), {num_threads, nullptr}) {
  const ModelShape& shape = runner_.shape();
  tokens_.resize(static_cast<std::size_t>(most_rows(shape, most)));
  for (std::size_t i = 0; i < tokens_.size(); ++i) tokens_[i] = static_cast<TokenId>(i) % shape.vocab_size;

  const int context = std::min(kDepth, shape.max_seq_len - 1) / shape.tokens_per_block;  // blocks
  const int sequences = std::min(max_rows(), shape.max_batch_size);
  const int prompt = std::min(max_rows(), shape.max_seq_len);
  const int blocks = std::max(context + sequences, (prompt + shape.tokens_per_block - 1) / shape.tokens_per_block);
  prompt_table_.resize(static_cast<std::size_t>(blocks));
  std::iota(prompt_table_.begin(), prompt_table_.end(), 0);
  for (int i = 0; i < sequences; ++i) {
    std::vector<BlockId>& table = tables_.emplace_back(prompt_table_.begin(), prompt_table_.begin() + context);
    table.push_back(context + i);
  }
  KvAllocation allocation;
  allocation.device_blocks.fill(blocks);
  runner_.allocate_kv(allocation);
}

void StepBench::run(int rows) {
  const ModelShape& shape = runner_.shape();
  sequences_.clear();
  const auto add = [&](int first, int count, int position, const std::vector<BlockId>& table) {
    SequenceStep& sequence = sequences_.emplace_back();
    sequence.tokens = std::span(tokens_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    sequence.start_position = position;
    sequence.block_tables.fill(table);
    sequence.sampling.emplace();  // greedy: logits go no further, as in a server
  };
  if (has_logits(rows)) {
    const int position = std::min(kDepth, shape.max_seq_len - 1);
    for (int i = 0; i < rows; ++i) add(i, 1, position, tables_[static_cast<std::size_t>(i)]);
  } else {
    add(0, rows, 0, prompt_table_);
  }
  runner_.step(sequences_, outputs_);
}

int StepBench::repeats(int rows) {
  int& count = repeats_[rows];
  if (count == 0) {
    run(rows);  // pages and caches
    const auto begin = Clock::now();
    run(rows);
    count = std::clamp(static_cast<int>(kLeastSeconds / seconds_since(begin)), 1, kMostRepeats);
  }
  return count;
}

double StepBench::seconds(int rows, const CpuTactics& tactics) {
  runner_.set_tactics(tactics);
  const int count = repeats(rows);
  if (count > 1) run(rows);  // threads that slept are awake
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) run(rows);
  return seconds_since(begin) / count;
}

StepBench::Profile StepBench::profile(int rows, const CpuTactics& tactics, int threads) {
  runner_.set_tactics(tactics);
  const int count = repeats(rows);
  if (count > 1) run(rows);
  runner_.set_profiling(true);
  for (int i = 0; i < count; ++i) run(rows);
  const StepProfile profile = runner_.profile();
  runner_.set_profiling(false);

  std::map<std::string, std::pair<double, std::int64_t>> sums;  // seconds of all threads, ops
  for (const OpProfile& op : profile.ops) {
    if (op.shape.empty() || op.op == "norm_moe") continue;  // experts have tiles of their own
    if (op.op == "lm_head" && !has_logits(rows)) continue;
    auto& [seconds, ops] = sums[op.shape.substr(0, op.shape.find(','))];
    seconds += op.compute_seconds + op.wait_seconds;
    ops += op.count;
  }
  Profile result{profile.seconds / count, {}};
  for (const auto& [shape, sum] : sums) {
    result.shapes[shape] = sum.first * tp_ / (static_cast<double>(threads) * count * static_cast<double>(sum.second));
  }
  return result;
}

}  // namespace aotllm
