// Time of scheduling on one thread: `bench_scheduler`. Prints the median and the 99th percentile, in µs of CPU time, of
// a step's share: WaitingQueue::advance and front, then Scheduler::plan, for 256 that run and 1,000 that wait, with
// prompts of 4,096 tokens. Snapshots are made beforehand: that is the batcher's share.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <vector>

#include "aotllm/scheduler.h"
#include "aotllm/waiting_queue.h"

namespace {

using namespace aotllm;

constexpr std::int32_t kRunning = 256;
constexpr std::int32_t kWaiting = 1000;
constexpr std::int32_t kPrompt = 4096;
constexpr std::int32_t kTokensPerBlock = 16;
constexpr int kSteps = 20000;

/// CPU time of this thread in µs: other processes do not count.
double thread_microseconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec);
}

struct Scene {
  const char* name;
  std::int32_t num_candidates;  ///< waiting ones in the snapshot
  std::int32_t num_contexts;    ///< of those who run
  std::vector<std::int32_t> windows;
  std::int32_t free_blocks;
};

std::vector<std::uint64_t> prompt_keys(std::int32_t owner) {
  std::vector<std::uint64_t> keys;
  for (std::int32_t i = 0; i < kPrompt / kTokensPerBlock; ++i) {
    keys.push_back(static_cast<std::uint64_t>(owner) << 32U | static_cast<std::uint64_t>(i));
  }
  return keys;
}

Snapshot make_snapshot(const Scene& scene, const std::vector<std::vector<std::uint64_t>>& keys) {
  Snapshot snapshot;
  for (std::int32_t i = 0; i < kRunning; ++i) {
    const bool is_context = i >= kRunning - scene.num_contexts;
    const std::int32_t num_tokens = is_context ? kPrompt : kPrompt + 1 + i % 100;
    const std::int32_t num_computed = is_context ? kTokensPerBlock * 8 : num_tokens - 1;
    const std::int32_t blocks = (num_computed + kTokensPerBlock - 1) / kTokensPerBlock;
    snapshot.running.push_back({.id = i + 1,
                                .num_tokens = num_tokens,
                                .num_computed = num_computed,
                                .max_len = kPrompt + 1024,
                                .is_context = is_context,
                                .num_blocks = {blocks, std::min(blocks, 65)},
                                .block_keys = keys[static_cast<std::size_t>(i)]});
  }
  for (std::int32_t i = 0; i < scene.num_candidates; ++i) {
    snapshot.waiting.push_back({.id = kRunning + i + 1,
                                .num_tokens = kPrompt,
                                .max_len = kPrompt + 1024,
                                .is_context = true,
                                .block_keys = keys[static_cast<std::size_t>(kRunning + i)]});
  }
  snapshot.free_blocks = {scene.free_blocks, scene.free_blocks};
  snapshot.total_blocks = {1 << 20, 1 << 20};
  return snapshot;
}

void bench(const Scene& scene) {
  std::vector<std::vector<std::uint64_t>> keys;
  for (std::int32_t i = 0; i < kRunning + scene.num_candidates; ++i) {
    keys.push_back(prompt_keys(i));
  }
  const Snapshot snapshot = make_snapshot(scene, keys);
  SchedulerConfig config{.max_batch_size = 2 * kRunning,
                         .max_num_tokens = 2048,
                         .max_chunk_tokens = 512,
                         .tokens_per_block = kTokensPerBlock,
                         .windows = scene.windows};
  const Scheduler scheduler(config);
  WaitingQueue queue(QueuePolicy::kPriority, 1'000'000);
  for (std::int32_t i = 0; i < kWaiting; ++i) {
    queue.insert({.id = kRunning + i + 1, .priority = i % 3});
  }
  std::vector<double> times;
  std::size_t checksum = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double before = thread_microseconds();
    checksum += queue.advance(step).size() + queue.front(static_cast<std::size_t>(scene.num_candidates)).size();
    const StepPlan plan = scheduler.plan(snapshot);
    times.push_back(thread_microseconds() - before);
    checksum += plan.sequences.size() * 1000 + plan.admitted.size();
  }
  std::sort(times.begin(), times.end());
  std::printf("  %-44s median %6.2f µs  p99 %6.2f µs  (%zu run a step)\n", scene.name, times[times.size() / 2],
              times[times.size() * 99 / 100], checksum / 1000 / kSteps);
}

}  // namespace

int main() {
  std::printf("%d running, %d waiting, prompts of %d tokens\n", kRunning, kWaiting, kPrompt);
  const std::vector<Scene> scenes = {
      {"generations, full memory", 4, 0, {0}, 20},
      {"generations, two groups, full memory", 4, 0, {0, 1024}, 20},
      {"generations, 4 newcomers admitted", 4, 0, {0}, 1 << 19},
      {"generations and 8 contexts, 4 candidates", 4, 8, {0, 1024}, 1 << 19},
      {"generations and 8 contexts, 256 candidates", 256, 8, {0, 1024}, 1 << 19},
  };
  for (const Scene& scene : scenes) {
    bench(scene);
  }
  return 0;
}
