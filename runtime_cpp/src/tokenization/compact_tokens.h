#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "aotllm/model_runner.h"
#include "engine/safetensors.h"
#include "support/mapped_file.h"

namespace aotllm {

/// A byte-pair vocabulary with its merges, used where the file `tokenizer.tokens` of an engine is mapped
/// (docs/engine_format.md): nothing is read before it is asked for, and all processes share its pages.
///
/// `encode` gives the tokens that the BPE model of Hugging Face's tokenizers gives to one word: the merge of the lowest
/// rank first, of equal ones the leftmost.
class CompactTokens {
 public:
  /// Throws Error(kEngine) where the file cannot be read or is damaged.
  explicit CompactTokens(const std::string& path);

  /// Ids are below this; some may have no token.
  std::int64_t size() const noexcept { return size_; }
  /// As the vocabulary spells it; nullopt for ids without a token.
  std::optional<std::string_view> spelling(std::int64_t id) const;
  /// nullopt for what is no token.
  std::optional<TokenId> find(std::string_view spelling) const;
  /// Ids whose flags have all of `flags`, in order.
  std::vector<TokenId> with_flags(std::uint8_t flags) const;
  /// Bytes of the tensor of that name; throws Error(kEngine) where it is missing.
  std::string_view text(std::string_view tensor) const;

  /// Appends the tokens of a word, UTF-8 text that holds no added token.
  void encode(std::string_view word, std::vector<TokenId>& ids) const;

 private:
  /// A record of `merges`, whose order is their rank.
  struct Merge {
    TokenId left;
    TokenId right;
    TokenId merged;
  };
  struct Found {
    std::uint32_t rank;
    TokenId merged;
  };
  struct Symbols;

  template <class T>
  std::span<const T> array(std::string_view tensor) const;
  std::optional<Found> merge_of(TokenId left, TokenId right) const;
  std::optional<TokenId> find_in_model(std::string_view spelling) const;
  TokenId id_of_byte_token(std::uint8_t byte) const;
  std::string spelled(std::string_view word) const;
  void start(std::string_view spelling, Symbols& symbols) const;

  MappedFile file_;
  SafeTensors tensors_;
  std::int64_t size_ = 0;
  std::span<const std::uint32_t> offsets_;      ///< [size + 1] of spellings in text_
  std::span<const std::uint8_t> text_;          ///< all spellings
  std::span<const std::uint8_t> flags_;         ///< [size]
  std::span<const std::uint32_t> token_slots_;  ///< [2^n] open addressing by CRC-32 of the spelling
  std::span<const std::uint32_t> merge_slots_;  ///< [2^n] open addressing by the pair
  std::span<const Merge> merges_;
  bool whole_words_ = false;  ///< a word that is a token stays whole, whatever its merges
  bool byte_level_ = false;   ///< words are spelled in GPT-2's byte alphabet; else as they are, with byte tokens
  std::string space_;         ///< what stands for a space in spellings; not with byte_level_
};

/// Flags of a token in the file.
inline constexpr std::uint8_t kTokenOfModel = 1;
inline constexpr std::uint8_t kTokenSpecial = 2;
inline constexpr std::uint8_t kTokenMarkup = 4;

}  // namespace aotllm
