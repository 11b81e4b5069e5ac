// Time of the whole batcher beside the runner: `bench_batcher`. 256 sequences run and 1,000 wait, with prompts of 4,096
// tokens; the runner does nothing. Prints the median and the 99th percentile, in µs of CPU time on one thread, of what
// a step takes for planning with its snapshot (made ahead or not), for blocks, and for all of it with sampling from a
// vocabulary of 8. The prefix match of a prompt of 32,768 tokens stands beside it.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <numeric>
#include <vector>

#include "aotllm/kv_cache.h"
#include "manager/inflight_batcher.h"
#include "manager/limits.h"

namespace {

using namespace aotllm;

constexpr std::int32_t kRunning = 256;
constexpr std::int32_t kWaiting = 1000;
constexpr std::int32_t kPrompt = 4096;
constexpr std::int32_t kOutput = 512;
constexpr std::int32_t kVocab = 8;

/// CPU time of this thread in µs: other processes do not count.
double thread_microseconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec);
}

class IdleRunner final : public ModelRunner {
 public:
  explicit IdleRunner(std::vector<KvGroupShape> groups) {
    shape_.vocab_size = kVocab;
    shape_.num_layers = 1;
    shape_.max_seq_len = kPrompt + kOutput + 1;
    shape_.max_num_tokens = 8192;
    shape_.max_batch_size = kRunning;
    shape_.tokens_per_block = 16;
    shape_.kv_groups = std::move(groups);
  }

  const ModelShape& shape() const override { return shape_; }
  void allocate_kv(const KvAllocation&) override {}
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    const double begin = thread_microseconds();
    outputs.vocab_size = kVocab;
    std::size_t rows = 0;
    for (const SequenceStep& sequence : sequences) {
      rows += sequence.num_output_rows();
    }
    outputs.logits.assign(rows * static_cast<std::size_t>(kVocab), 0.0F);
    spent_ += thread_microseconds() - begin;
  }
  void copy_blocks(std::span<const BlockCopy>) override {}

  double take_spent() { return std::exchange(spent_, 0.0); }

 private:
  ModelShape shape_;
  double spent_ = 0.0;
};

void print(const char* what, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  std::printf("  %-34s median %7.1f µs   p99 %7.1f µs\n", what, values[values.size() / 2],
              values[values.size() * 99 / 100]);
}

/// Steps in which all that run are generations: from the last context to the first end.
void bench_steps(const char* name, std::vector<KvGroupShape> groups) {
  IdleRunner runner(std::move(groups));
  ManagerConfig config;
  config.num_kv_blocks = kRunning * (kPrompt + kOutput + 16) / 16;
  config.eos_token_ids = {kVocab - 1};
  const Limits limits = resolve_limits(runner.shape(), config, {});
  InflightBatcher batcher(runner, limits);
  for (std::int32_t i = 0; i < kRunning + kWaiting; ++i) {
    Request request;
    request.prompt_token_ids.assign(kPrompt, 0);
    for (std::int32_t bit = 0; bit < 12; ++bit) {  // no two prompts share a block
      request.prompt_token_ids[static_cast<std::size_t>(bit)] = (i >> bit) & 1;
    }
    request.sampling.max_tokens = kOutput;
    request.sampling.temperature = 0.0;
    auto sequence = std::make_unique<Sequence>(i + 1, 0, request, 0, Clock::time_point{}, limits);
    sequence->id = i + 1;
    batcher.add(std::move(sequence));
  }
  std::vector<double> planning;
  std::vector<double> whole;
  while (batcher.stats().finished == 0) {
    const double begin = thread_microseconds();
    batcher.plan();
    const double planned = thread_microseconds();
    runner.take_spent();
    batcher.run();
    const double end = thread_microseconds();
    const Stats stats = batcher.stats();
    if (stats.last_step.context_tokens == 0 && stats.last_step.generation_tokens == kRunning) {
      planning.push_back(planned - begin);
      whole.push_back(end - begin - runner.take_spent());
    }
    batcher.take_responses();
  }
  std::printf("%s (%zu steps)\n", name, whole.size());
  print("before the runner starts", planning);
  print("all but the runner", whole);
}

void bench_match() {
  constexpr std::int32_t kTokens = 32768;
  KvCacheConfig config;
  config.tokens_per_block = 16;
  config.groups = {{0, 2 * kTokens / 16, 0}};
  KvCache cache(config);
  std::vector<TokenId> tokens(kTokens);
  std::iota(tokens.begin(), tokens.end(), 0);
  PrefixKeys keys({}, 16);
  keys.extend(tokens);
  BlockTable table;
  cache.acquire(table, keys, tokens);
  cache.grow(table, 0, kTokens);
  cache.commit(table, keys, tokens);
  cache.release(table, keys, tokens);
  std::vector<double> times;
  for (int i = 0; i < 2000; ++i) {
    const double begin = thread_microseconds();
    const PrefixMatch match = cache.match(keys, tokens);
    times.push_back(thread_microseconds() - begin);
    if (match.num_tokens != kTokens - 1) {
      std::printf("only %d tokens match\n", match.num_tokens);
    }
  }
  std::printf("prefix match of %d tokens\n", kTokens);
  print("match", times);
}

}  // namespace

int main() {
  bench_steps("full attention", {{0, 1 << 16}});
  bench_steps("full attention and a window of 512", {{0, 1 << 16}, {512, 1 << 16}});
  bench_match();
}
