#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aotllm/constraint.h"
#include "constraint/byte_pair_tokenizer.h"
#include "constraint/llguidance_library.h"

namespace aotllm {

/// What a compiler shares with all that it has made: the library, and the vocabulary in the library's form.
class GrammarEnvironment {
 public:
  /// Throws as GrammarCompiler's constructor.
  GrammarEnvironment(const std::string& library_path, const GrammarVocabulary& vocabulary);
  ~GrammarEnvironment();
  GrammarEnvironment(const GrammarEnvironment&) = delete;
  GrammarEnvironment& operator=(const GrammarEnvironment&) = delete;

  const llguidance::Library& library() const noexcept { return library_; }
  const llguidance::Tokenizer* tokenizer() const noexcept { return tokenizer_; }
  std::size_t mask_words() const noexcept { return allowed_.size(); }

  /// The tokens that any grammar may allow: those with bytes, and the end tokens. [mask_words()]
  const std::vector<std::uint32_t>& allowed() const noexcept { return allowed_; }

 private:
  static std::size_t tokenize(const void* self, const std::uint8_t* bytes, std::size_t num_bytes, std::uint32_t* tokens,
                              std::size_t capacity) noexcept;

  const llguidance::Library library_;
  std::vector<std::uint32_t> allowed_;
  std::unique_ptr<const BytePairTokenizer> byte_pairs_;
  llguidance::Tokenizer* tokenizer_ = nullptr;  ///< owned; freed by the library
};

/// A matcher of the library, and the environment that it needs.
class GrammarState final : public Constraint {
 public:
  struct FreeMatcher {
    std::shared_ptr<const GrammarEnvironment> environment;
    void operator()(llguidance::Matcher* matcher) const { environment->library().free_matcher(matcher); }
  };
  using MatcherPtr = std::unique_ptr<llguidance::Matcher, FreeMatcher>;

  /// `param`: the request's field, for errors.
  GrammarState(MatcherPtr matcher, std::string param) : matcher_(std::move(matcher)), param_(std::move(param)) {}

  void fill_mask(std::span<std::uint32_t> mask) override;
  void accept(TokenId token) override;
  std::vector<TokenId> take_forced(std::int32_t limit) override;
  bool finished() const override;
  std::unique_ptr<Constraint> clone() const override;

 private:
  const GrammarEnvironment& environment() const noexcept { return *matcher_.get_deleter().environment; }
  const llguidance::Library& library() const noexcept { return environment().library(); }
  std::string error() const;

  MatcherPtr matcher_;
  std::string param_;
};

/// The library's words about a failure in one line without its dumps, of a few hundred characters at most.
std::string plain_reason(const char* error);

}  // namespace aotllm
