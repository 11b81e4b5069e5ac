#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace aotllm::llguidance {

// Our declarations of the part of llguidance's C interface that we use, as of 1.9.1 (`parser/llguidance.h` there). The
// structs have had these layouts since 1.7.0, when LlgTokenizerInitV2 came.

struct Tokenizer;  ///< LlgTokenizer
struct Matcher;    ///< LlgMatcher

/// LlgTokenizeFn: writes at most `capacity` tokens and returns how many there are. Thread-safe; must not throw.
using TokenizeFunction = std::size_t (*)(const void* user_data, const std::uint8_t* bytes, std::size_t num_bytes,
                                         std::uint32_t* tokens, std::size_t capacity);

/// LlgTokenizerInitV2. The library reads `struct_size` bytes of it, so it may grow.
struct TokenizerInit {
  std::size_t struct_size = sizeof(TokenizerInit);
  std::uint32_t vocab_size = 0;
  std::uint32_t eos_token_id = 0;  ///< UINT32_MAX = none
  const std::uint32_t* token_lengths = nullptr;
  const std::uint8_t* token_bytes = nullptr;
  const char* tokenizer_json = nullptr;
  bool tokenize_assumes_string = false;
  TokenizeFunction tokenize = nullptr;
  bool use_approximate_greedy_tokenize = false;
  const void* tokenize_user_data = nullptr;
  const char* const* slices = nullptr;
  const std::uint32_t* extra_eos_token_ids = nullptr;
  std::uint32_t num_extra_eos_token_ids = 0;
};

/// LlgParserLimits; see the library for what each one counts.
struct ParserLimits {
  std::size_t max_items_in_row;
  std::uint64_t initial_lexer_fuel;
  std::uint64_t step_lexer_fuel;
  std::size_t step_max_items;
  std::size_t max_lexer_states;
  std::size_t max_grammar_size;
  bool precompute_large_lexemes;
  bool verbose_errors;
};

/// LlgConstraintInit. It carries no size, and `constraint_init_set_defaults` writes all of it: the reserve is there so
/// that a version with more fields would not write past its end.
struct MatcherInit {
  const Tokenizer* tokenizer;
  std::uint32_t log_buffer_level;
  std::uint32_t log_stderr_level;
  bool ff_tokens_ok;
  bool backtrack_ok;
  ParserLimits limits;
  std::uint64_t reserve[32];
};

/// The functions that we use. Names are the library's without `llg_`; all return negative numbers for errors.
struct Library {
  /// Throws Error(kEngineIncompatible) where the file is no llguidance of a supported version.
  explicit Library(const std::string& path);

  std::string version;  ///< e.g. "1.9.1"

  const char* (*get_version)();
  Tokenizer* (*new_tokenizer_v2)(const TokenizerInit*, char* error, std::size_t error_size);
  void (*free_tokenizer)(Tokenizer*);
  void (*constraint_init_set_defaults)(MatcherInit*, const Tokenizer*);
  Matcher* (*new_matcher)(const MatcherInit*, const char* kind, const char* text);
  Matcher* (*clone_matcher)(const Matcher*);
  void (*free_matcher)(Matcher*);
  std::int32_t (*matcher_compute_mask_into)(Matcher*, std::uint32_t* mask, std::size_t mask_bytes);
  std::int32_t (*matcher_consume_token)(Matcher*, std::uint32_t token);
  std::int32_t (*matcher_consume_tokens)(Matcher*, const std::uint32_t* tokens, std::size_t count);
  std::int32_t (*matcher_compute_ff_tokens)(Matcher*, std::uint32_t* tokens, std::size_t capacity);
  bool (*matcher_is_stopped)(const Matcher*);
  bool (*matcher_is_error)(const Matcher*);
  const char* (*matcher_get_error)(Matcher*);
};

}  // namespace aotllm::llguidance
