#include "sampling/no_repeat_ngram.h"

#include <algorithm>
#include <limits>

namespace aotllm {

NoRepeatNgram::NoRepeatNgram(std::int32_t size) : size_(static_cast<std::size_t>(size)) {}

void NoRepeatNgram::apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t) {
  const std::size_t start = size_ - 1;  // length of what the text ends with
  if (tokens.size() < size_) {
    return;
  }
  const auto tail = tokens.last(start);
  for (std::size_t next = start; next < tokens.size(); ++next) {
    if (std::ranges::equal(tokens.subspan(next - start, start), tail)) {
      logits[static_cast<std::size_t>(tokens[next])] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace aotllm
