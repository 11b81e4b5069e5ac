#include "sampling/no_repeat_ngram.h"

#include <algorithm>

namespace aotllm {

NoRepeatNgram::NoRepeatNgram(std::int32_t size) : size_(static_cast<std::size_t>(size)) {}

void NoRepeatNgram::list(std::span<const TokenId> tokens, std::int32_t /*num_prompt_tokens*/,
                         std::vector<TokenId>& forbidden) const {
  const std::size_t start = size_ - 1;  // length of what the text ends with
  if (tokens.size() < size_) {
    return;
  }
  const auto tail = tokens.last(start);
  for (std::size_t next = start; next < tokens.size(); ++next) {
    if (std::ranges::equal(tokens.subspan(next - start, start), tail)) {
      forbidden.push_back(tokens[next]);
    }
  }
}

}  // namespace aotllm
