#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "aotllm/model_runner.h"

namespace aotllm::testing {

inline std::uint64_t mix(std::uint64_t x) {  // the finalizer of SplitMix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

/// A prompt that begins with this token makes logits of NaN.
inline constexpr TokenId kNanToken = 1;

/// What a cache slot holds in place of K and V: which token at which position, computed by which adapter.
struct Slot {
  TokenId token = -1;
  std::int32_t position = -1;
  AdapterId adapter = -1;
};

inline std::uint64_t fold(std::uint64_t hash, const Slot& slot) {
  return mix(mix(hash ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(slot.token)) << 32 |
                         static_cast<std::uint32_t>(slot.position))) ^
             static_cast<std::uint32_t>(slot.adapter));
}

/// First position that a token at `position` sees in a group.
inline std::int32_t first_seen(std::int32_t position, std::int32_t window) {
  return window == 0 ? 0 : std::max(0, position - window + 1);
}

/// The fake model: what a token at `position` has of its sequence, `slot(group, position)` being what it reads. The
/// hash covers, in each group, all that the token sees.
template <class ReadSlot>
std::uint64_t hash_of(const ModelShape& shape, std::int32_t position, ReadSlot&& slot) {
  std::uint64_t hash = 0;
  for (int group = 0; group < static_cast<int>(shape.kv_groups.size()); ++group) {
    const std::int32_t window = shape.kv_groups[static_cast<std::size_t>(group)].window;
    for (std::int32_t seen = first_seen(position, window); seen <= position; ++seen) {
      hash = fold(hash, slot(group, seen));
    }
  }
  return hash;
}

/// Logits in [0, 8) from a hash, NaN for the poisoned ones.
inline void fake_logits(std::uint64_t hash, TokenId first_token, std::span<float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = first_token == kNanToken ? std::numeric_limits<float>::quiet_NaN()
                                      : static_cast<float>(mix(hash + i) >> 40) * 0x1.0p-21F;
  }
}

/// A hidden state in [0, 1) from a hash, NaN for the poisoned ones.
inline void fake_hidden(std::uint64_t hash, TokenId first_token, std::span<float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = first_token == kNanToken ? std::numeric_limits<float>::quiet_NaN()
                                      : static_cast<float>(mix(~hash + i) >> 40) * 0x1.0p-24F;
  }
}

inline ModelShape small_shape() {
  return {.vocab_size = 37,
          .hidden_size = 5,
          .num_layers = 1,
          .max_seq_len = 48,
          .max_num_tokens = 32,
          .max_batch_size = 8,
          .tokens_per_block = 4,
          .kv_groups = {{.window = 0, .bytes_per_block = 64}}};
}

/// A model with layers that see everything, and layers that see 10 and 6 tokens.
inline ModelShape windowed_shape() {
  ModelShape shape = small_shape();
  shape.num_layers = 3;
  shape.kv_groups = {{0, 64}, {10, 64}, {6, 64}};
  return shape;
}

}  // namespace aotllm::testing
