// Speed of the KV cache's bookkeeping on one thread: `bench_kv_cache`. Prints medians of CPU time.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <random>
#include <utility>
#include <vector>

#include "aotllm/kv_cache.h"

namespace {

using aotllm::BlockTable;
using aotllm::KvCache;
using aotllm::PrefixKeys;
using aotllm::TokenId;

constexpr std::int32_t kBlock = 16;
constexpr std::int32_t kLongPrompt = 32768;
constexpr std::int32_t kPrompt = 4096;
constexpr int kRunning = 256;
constexpr int kSamples = 51;

/// CPU time of this thread in seconds: other processes do not count.
double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Median time of one call in µs, without what `prepare` does before each.
template <class Prepare, class Run>
double microseconds(Prepare prepare, Run run) {
  std::vector<double> times;
  for (int i = 0; i < kSamples; ++i) {
    const auto prepared = prepare();
    const double before = thread_seconds();
    run(prepared);
    times.push_back(thread_seconds() - before);
  }
  std::ranges::nth_element(times, times.begin() + kSamples / 2);
  return 1e6 * times[kSamples / 2];
}

template <class Run>
double microseconds(Run run) {
  return microseconds([] { return 0; }, [&](int) { run(); });
}

struct Sequence {
  Sequence(std::mt19937& random, std::int32_t length) : keys({}, kBlock) {
    for (std::int32_t i = 0; i < length; ++i) {
      tokens.push_back(static_cast<TokenId>(random() % 100000));
    }
    keys.extend(tokens);
  }

  std::vector<TokenId> tokens;
  PrefixKeys keys;
  BlockTable table;
  std::int32_t num_computed = 0;
};

void advance(KvCache& kv, Sequence& sequence, std::int32_t end) {
  kv.grow(sequence.table, sequence.num_computed, end);
  sequence.num_computed = end;
  kv.commit(sequence.table, sequence.keys, std::span(sequence.tokens).first(static_cast<std::size_t>(end)));
}

/// Prompts that are computed block by block in turns lie scattered in the tree; those computed one by one in rows.
void bench_long_prompt(const char* name, const std::vector<aotllm::KvGroupConfig>& groups, bool scattered) {
  constexpr int kPrompts = 40;
  std::mt19937 random(1);
  KvCache kv({kBlock, groups, 0});
  std::vector<Sequence> sequences;
  for (int i = 0; i < kPrompts; ++i) {
    sequences.emplace_back(random, kLongPrompt);
  }
  for (std::int32_t end = kBlock; scattered && end <= kLongPrompt; end += kBlock) {
    std::ranges::shuffle(sequences, random);
    for (Sequence& sequence : sequences) {
      advance(kv, sequence, end);
    }
  }
  for (Sequence& sequence : sequences) {
    for (std::int32_t end = sequence.num_computed; end < kLongPrompt;) {
      end = std::min(end + 2048, kLongPrompt);
      advance(kv, sequence, end);
    }
    kv.release(sequence.table, sequence.keys, sequence.tokens);
  }
  // Another prompt each time, with tokens and keys that have just been made: of the tree, nothing is in the CPU's
  // caches.
  std::size_t next = 0;
  const double match = microseconds(
      [&] {
        const std::vector<TokenId> tokens = sequences[next++ % kPrompts].tokens;
        PrefixKeys keys({}, kBlock);
        keys.extend(tokens);
        return std::pair(tokens, keys);
      },
      [&](const auto& prompt) { kv.match(prompt.second, prompt.first); });
  const double again = microseconds([&] { kv.match(sequences[0].keys, sequences[0].tokens); });
  const double acquire = microseconds([&] {
    Sequence& sequence = sequences[next++ % kPrompts];
    kv.acquire(sequence.table, sequence.keys, sequence.tokens);
    kv.discard(sequence.table);
    kv.take_copies();
  });
  std::printf("  %-30s match %6.1f us, again %6.1f us, acquire + give back %6.1f us\n", name, match, again, acquire);
}

/// Decode steps of kRunning sequences, whose block edges do not coincide.
void bench_decode(const char* name, const std::vector<aotllm::KvGroupConfig>& groups) {
  constexpr std::int32_t kGenerated = 64;
  std::mt19937 random(2);
  KvCache kv({kBlock, groups, 0});
  std::vector<Sequence> sequences;
  for (int i = 0; i < kRunning; ++i) {
    sequences.emplace_back(random, kPrompt + kGenerated + kBlock);
    for (std::int32_t end = 0, prompt = kPrompt + i % kBlock; end < prompt;) {
      end = std::min(end + 512, prompt);
      advance(kv, sequences.back(), end);
    }
  }
  const double step = microseconds([&] {
    for (Sequence& sequence : sequences) {
      advance(kv, sequence, sequence.num_computed + 1);
    }
  });
  std::printf("  %-30s %6.2f us a step, %5.1f ns a sequence\n", name, step, 1e3 * step / kRunning);
  for (Sequence& sequence : sequences) {
    kv.discard(sequence.table);
  }
}

void bench_keys() {
  std::mt19937 random(3);
  const Sequence sequence(random, kLongPrompt);
  const double time = microseconds([&] {
    PrefixKeys keys({}, kBlock);
    keys.extend(sequence.tokens);
  });
  std::printf("keys of %d tokens: %.1f us\n", kLongPrompt, time);
}

}  // namespace

int main() {
  const aotllm::KvGroupConfig full{0, 100000, 0};
  const aotllm::KvGroupConfig window{1024, 100000, 0};
  std::printf("a cached prompt of %d tokens, blocks of %d, 82k nodes\n", kLongPrompt, kBlock);
  bench_long_prompt("full, computed in a row", {full}, false);
  bench_long_prompt("full, scattered", {full}, true);
  bench_long_prompt("full and window, in a row", {full, window}, false);
  bench_long_prompt("full and window, scattered", {full, window}, true);
  bench_keys();
  std::printf("grow + commit of %d sequences at %d tokens, one token each\n", kRunning, kPrompt);
  bench_decode("full", {full});
  bench_decode("full and window", {full, window});
  return 0;
}
