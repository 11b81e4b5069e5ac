#include "sampling/token_counts.h"

#include <algorithm>

namespace aotllm {
namespace {

std::size_t common_prefix(std::span<const TokenId> before, std::span<const TokenId> now) {
  // The usual case first: it is a memcmp.
  if (before.size() <= now.size() && std::equal(before.begin(), before.end(), now.begin())) {
    return before.size();
  }
  return static_cast<std::size_t>(std::ranges::mismatch(before, now).in1 - before.begin());
}

}  // namespace

void TokenCounts::follow(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) {
  const auto prompt = static_cast<std::size_t>(num_prompt_tokens);
  const std::size_t common = prompt == num_prompt_tokens_ ? common_prefix(text_, tokens) : 0;
  while (text_.size() > common) {
    count(text_.size() - 1, -1);
    text_.pop_back();
  }
  num_prompt_tokens_ = prompt;
  while (text_.size() < tokens.size()) {
    text_.push_back(tokens[text_.size()]);
    count(text_.size() - 1, 1);
  }
}

void TokenCounts::count(std::size_t position, std::int32_t change) {
  const TokenId token = text_[position];
  const auto [found, is_new] = index_.try_emplace(token, entries_.size());
  if (is_new) {
    entries_.push_back({.token = token});
  }
  Entry& entry = entries_[found->second];
  (position < num_prompt_tokens_ ? entry.in_prompt : entry.in_output) += change;
}

}  // namespace aotllm
