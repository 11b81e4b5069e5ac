#include "runner/cuda/token_counter.h"

#include <algorithm>

#include "sampling/sampling.h"

namespace aotllm::cuda {
namespace {

/// Tokens that are counted at a time. The kernels read them from the host's memory.
constexpr std::size_t kRound = 8192;

}  // namespace

int TokenCounter::num_slots(int max_texts, int vocab_size) {
  const std::size_t most = kMostBytes / (sizeof(std::uint32_t) * static_cast<std::size_t>(vocab_size));
  return static_cast<int>(std::min(static_cast<std::size_t>(max_texts), most));
}

TokenCounter::TokenCounter(int num_slots, int vocab_size)
    : vocab_size_(vocab_size),
      counts_(static_cast<std::size_t>(num_slots) * static_cast<std::size_t>(vocab_size)),
      cleared_(static_cast<std::size_t>(num_slots)),
      tokens_(num_slots > 0 ? kRound : 0),
      slots_(tokens_.size()) {}

void TokenCounter::follow(std::span<const SequenceStep> sequences, const Stream& stream) {
  clear(sequences, stream);
  std::size_t front = 0;
  std::size_t back = tokens_.size();
  for (const SequenceStep& sequence : sequences) {
    if (!sequence.sampling || sequence.penalties.slot < 0) continue;
    const CountedText& text = sequence.text;
    for (auto i = static_cast<std::size_t>(text.num_counted); i < text.tokens.size(); ++i) {
      if (front == back) {
        count(front, tokens_.size() - back, stream);
        check(cudaStreamSynchronize(stream.handle), "counts of tokens");
        front = 0;
        back = tokens_.size();
      }
      const std::size_t place = i < static_cast<std::size_t>(text.num_prompt_tokens) ? front++ : --back;
      tokens_.data()[place] = text.tokens[i];
      slots_.data()[place] = sequence.penalties.slot;
    }
  }
  count(front, tokens_.size() - back, stream);
}

/// Empties the slots that others have left.
void TokenCounter::clear(std::span<const SequenceStep> sequences, const Stream& stream) {
  int cleared = 0;
  for (const SequenceStep& sequence : sequences) {
    if (sequence.sampling && sequence.penalties.slot >= 0 && sequence.text.num_counted == 0) {
      cleared_.data()[cleared++] = sequence.penalties.slot;
    }
  }
  if (cleared > 0) clear_counts(counts_.data(), vocab_size_, cleared_.device(), cleared, stream);
}

void TokenCounter::count(std::size_t num_prompt, std::size_t num_generated, const Stream& stream) const {
  const auto launch = [&](std::size_t begin, std::size_t size, bool in_prompt) {
    if (size == 0) return;
    count_tokens({counts_.data(), vocab_size_, static_cast<int>(size), tokens_.device() + begin,
                  slots_.device() + begin, in_prompt},
                 stream);
  };
  launch(0, num_prompt, true);
  launch(tokens_.size() - num_generated, num_generated, false);
}

}  // namespace aotllm::cuda
