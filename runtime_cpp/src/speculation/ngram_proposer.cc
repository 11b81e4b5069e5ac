#include <algorithm>
#include <utility>

#include "aotllm/draft_proposer.h"
#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

class NgramProposer final : public DraftProposer {
 public:
  NgramProposer(std::int32_t ngram_min, std::int32_t ngram_max) : ngram_min_(ngram_min), ngram_max_(ngram_max) {}

  void propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) override {
    drafts.assign(queries.size(), {});
    for (std::size_t i = 0; i < queries.size(); ++i) {
      const std::span<const TokenId> found = lookup(queries[i].tokens);
      const auto count = std::min(found.size(), static_cast<std::size_t>(queries[i].max_drafts));
      drafts[i].assign(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count));
    }
  }

  void forget(SequenceId /*id*/) override {}

 private:
  /// What followed the longest suffix that occurs earlier, at its latest occurrence; of equally long ones the latest.
  /// One pass from the end: O(tokens · ngram_max), mostly one comparison per token.
  std::span<const TokenId> lookup(std::span<const TokenId> tokens) const {
    const auto size = static_cast<std::ptrdiff_t>(tokens.size());
    std::ptrdiff_t best_length = ngram_min_ - 1;
    std::ptrdiff_t best_end = 0;
    for (std::ptrdiff_t end = size - 1; end > best_length && best_length < ngram_max_; --end) {
      std::ptrdiff_t length = 0;
      while (length < std::min<std::ptrdiff_t>(end, ngram_max_) &&
             tokens[static_cast<std::size_t>(end - 1 - length)] ==
                 tokens[static_cast<std::size_t>(size - 1 - length)]) {
        ++length;
      }
      if (length > best_length) {
        best_length = length;
        best_end = end;
      }
    }
    return best_end == 0 ? std::span<const TokenId>{} : tokens.subspan(static_cast<std::size_t>(best_end));
  }

  std::int32_t ngram_min_;
  std::int32_t ngram_max_;
};

}  // namespace

std::unique_ptr<DraftProposer> make_ngram_proposer(std::int32_t ngram_min, std::int32_t ngram_max) {
  if (ngram_min < 1 || ngram_max < ngram_min) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("ngram_min is ", ngram_min, " and ngram_max ", ngram_max, "; 1 ≤ ngram_min ≤ ngram_max is needed"),
                ngram_min < 1 ? "ngram_min" : "ngram_max");
  }
  return std::make_unique<NgramProposer>(ngram_min, ngram_max);
}

}  // namespace aotllm
