#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// The grammar state of one sequence: which tokens may come next.
///
/// Methods are never called concurrently on one object; `fill_mask` may run on another thread than the rest.
class Constraint {
 public:
  virtual ~Constraint() = default;

  /// Sets bit t % 32 of word t / 32 where token t may come next (end tokens where the grammar may end), and clears all
  /// others. `mask` [⌈vocab_size / 32⌉]. Throws Error(kInvalidRequest) where the grammar leaves no token, or takes more
  /// work than a step may; that ends this sequence only.
  virtual void fill_mask(std::span<std::uint32_t> mask) = 0;

  /// Advances by a drawn token, end tokens included. Throws Error(kInternal) where the grammar does not allow it.
  virtual void accept(TokenId token) = 0;

  /// Tokens that must come next whatever is drawn, at most `limit` (≥ 0) of them; the state is advanced past them.
  /// Often empty; never contains an end token. They are the tokens that `fill_mask` would allow one by one, each as the
  /// only one: who never calls this gets the same text.
  virtual std::vector<TokenId> take_forced(std::int32_t limit) = 0;

  /// Nothing may follow: the sequence ends here without an end token.
  virtual bool finished() const = 0;

  /// A copy of the state, which goes its own way. Thread-safe against other clones of the same object.
  virtual std::unique_ptr<Constraint> clone() const = 0;
};

/// The languages that grammars are written in.
enum class GrammarKind : std::uint8_t {
  kJsonSchema,  ///< a JSON schema, draft 2020-12
  kRegex,       ///< a regular expression, in the syntax of Rust's regex crate; it matches the whole text
  kLark,        ///< llguidance's dialect of Lark
};

/// What a sequence must look like.
struct Grammar {
  GrammarKind kind = GrammarKind::kJsonSchema;
  std::string text;
  std::string param;  ///< the field of the request that it came in, for errors
};

/// The vocabulary that grammars are compiled for.
struct GrammarVocabulary {
  /// Bytes of each token by id. Empty for tokens that no text is made of (control, unused and end tokens): no grammar
  /// ever allows them. At most vocab_size of them.
  std::vector<std::string> tokens;
  std::vector<TokenId> eos_token_ids;  ///< allowed where a grammar may end; may be empty
  std::int32_t vocab_size = 0;         ///< width of the logits
};

/// Bounds on what one grammar may cost.
struct GrammarLimits {
  std::size_t max_text_bytes = std::size_t{1} << 20;

  /// A grammar that has not compiled after this long is refused. The library cannot be interrupted: the attempt goes on
  /// in the background, and after `max_abandoned` of those no grammar is compiled until one of them has ended.
  double max_compile_seconds = 10.0;
  std::int32_t max_abandoned = 4;
};

/// Compiles grammars for one vocabulary, through the C interface of llguidance. Thread-safe.
class GrammarCompiler {
 public:
  /// `library_path`: the shared library of the llguidance Python package (`llguidance/_lib.abi3.so`); it stays loaded.
  ///
  /// Throws Error(kEngineIncompatible) where it cannot be loaded or is of another version than supported, and
  /// Error(kInvalidRequest) for a vocabulary that contradicts itself.
  GrammarCompiler(const std::string& library_path, const GrammarVocabulary& vocabulary, GrammarLimits limits = {});
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  /// The start state of a grammar whose first mask is known to exist. Blocks for up to limits.max_compile_seconds.
  ///
  /// Throws Error(kInvalidRequest, param = grammar.param) where the grammar is malformed, too large or cannot be met,
  /// and Error(kOverloaded) after too many abandoned attempts.
  std::unique_ptr<Constraint> compile(const Grammar& grammar) const;

  /// The library's own version, e.g. "1.9.1".
  const std::string& library_version() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;  ///< shared with constraints and with attempts that go on
};

}  // namespace aotllm
