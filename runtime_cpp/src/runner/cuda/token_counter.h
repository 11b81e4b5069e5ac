#pragma once

#include <cstdint>
#include <span>

#include "aotllm/model_runner.h"
#include "device_array.h"
#include "launch.h"
#include "runner/cuda/pinned.h"

namespace aotllm::cuda {

/// Counts on the device how often the tokens of texts occur, for penalties: a slot for each text.
class TokenCounter {
 public:
  /// Most memory that the counts take: 261 slots for 128,256 tokens.
  static constexpr std::size_t kMostBytes = std::size_t{128} << 20;

  /// Slots for `max_texts` texts at a time, or as many as kMostBytes hold.
  static int num_slots(int max_texts, int vocab_size);

  TokenCounter() = default;
  TokenCounter(int num_slots, int vocab_size);

  int num_slots() const noexcept { return static_cast<int>(cleared_.size()); }
  const std::uint32_t* counts() const noexcept { return counts_.data(); }  ///< [num_slots, vocab_size]

  /// Brings the slots of the sequences that have one up to their texts. Nothing that it has launched before runs any
  /// more. Waits for the stream only where the texts have much to count, as long prompts do when they begin.
  void follow(std::span<const SequenceStep> sequences, const Stream& stream);

 private:
  void clear(std::span<const SequenceStep> sequences, const Stream& stream);
  void count(std::size_t num_prompt, std::size_t num_generated, const Stream& stream) const;

  int vocab_size_ = 0;
  DeviceArray<std::uint32_t> counts_;
  PinnedArray<std::int32_t> cleared_;  ///< [num_slots]
  // Tokens to count with their slots: those of prompts from the front, generated ones from the back.
  PinnedArray<std::int32_t> tokens_;
  PinnedArray<std::int32_t> slots_;
};

}  // namespace aotllm::cuda
