#include "constraint/grammar_state.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Of a forced text this much is tokenized at a time. The library asks again for each token, with all that is left.
constexpr std::size_t kMaxTokenizedBytes = 1024;

constexpr std::uint32_t kNoToken = std::numeric_limits<std::uint32_t>::max();

/// First byte of what llguidance takes for special tokens; no UTF-8 text has it.
constexpr char kSpecialMarker = '\xFF';

void check(const GrammarVocabulary& vocabulary) {
  if (vocabulary.vocab_size < 1 || vocabulary.tokens.size() > static_cast<std::size_t>(vocabulary.vocab_size)) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("the vocabulary has ", vocabulary.tokens.size(), " tokens, but vocab_size is ",
                    vocabulary.vocab_size, "; it must be at least as large, and at least 1"),
                "vocab_size");
  }
  for (const TokenId token : vocabulary.eos_token_ids) {
    if (token < 0 || token >= vocabulary.vocab_size) {
      throw Error(ErrorKind::kInvalidRequest,
                  cat("eos_token_ids holds ", token, "; token ids are in [0, ", vocabulary.vocab_size, ")"),
                  "eos_token_ids");
    }
  }
}

/// One entry for each of vocab_size tokens: the bytes that text is made of, else empty.
std::vector<std::string> text_tokens(const GrammarVocabulary& vocabulary) {
  std::vector<std::string> tokens = vocabulary.tokens;
  tokens.resize(static_cast<std::size_t>(vocabulary.vocab_size));
  for (std::string& token : tokens) {
    if (token.starts_with(kSpecialMarker)) {
      token.clear();
    }
  }
  for (const TokenId token : vocabulary.eos_token_ids) {
    tokens[static_cast<std::size_t>(token)].clear();
  }
  return tokens;
}

}  // namespace

std::string plain_reason(const char* error) {
  std::string_view text = error != nullptr ? error : "no reason given";
  text = text.substr(0, std::min(text.find("<state>"), text.find("<backtrace>")));
  constexpr std::size_t kMaxBytes = 300;
  std::string reason;
  for (const char c : text.substr(0, kMaxBytes)) {
    const bool is_space = c == ' ' || c == '\n' || c == '\r' || c == '\t';
    if (!is_space) {
      reason += c;
    } else if (!reason.empty() && reason.back() != ' ') {
      reason += ' ';
    }
  }
  while (!reason.empty() && reason.back() == ' ') {
    reason.pop_back();
  }
  return text.size() > kMaxBytes ? reason + " …" : reason;
}

GrammarEnvironment::GrammarEnvironment(const std::string& library_path, const GrammarVocabulary& vocabulary)
    : library_(library_path) {
  check(vocabulary);
  const std::vector<std::string> tokens = text_tokens(vocabulary);
  byte_pairs_ = std::make_unique<BytePairTokenizer>(tokens);

  allowed_.resize((tokens.size() + 31) / 32);
  const auto allow = [this](std::size_t token) { allowed_[token / 32] |= std::uint32_t{1} << token % 32; };
  std::vector<std::uint32_t> lengths;
  std::string bytes;
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    lengths.push_back(static_cast<std::uint32_t>(tokens[id].size()));
    bytes += tokens[id];
    if (!tokens[id].empty()) {
      allow(id);
    }
  }
  const std::vector<std::uint32_t> eos(vocabulary.eos_token_ids.begin(), vocabulary.eos_token_ids.end());
  std::for_each(eos.begin(), eos.end(), allow);

  llguidance::TokenizerInit init;
  init.vocab_size = static_cast<std::uint32_t>(tokens.size());
  init.eos_token_id = eos.empty() ? kNoToken : eos.front();
  init.token_lengths = lengths.data();
  init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
  init.tokenize = &GrammarEnvironment::tokenize;
  init.tokenize_user_data = this;
  if (eos.size() > 1) {
    init.extra_eos_token_ids = eos.data() + 1;
    init.num_extra_eos_token_ids = static_cast<std::uint32_t>(eos.size() - 1);
  }
  std::array<char, 1024> error{};
  tokenizer_ = library_.new_tokenizer_v2(&init, error.data(), error.size());
  if (tokenizer_ == nullptr) {
    throw Error(ErrorKind::kInternal, "llguidance does not take the vocabulary: " + plain_reason(error.data()));
  }
}

GrammarEnvironment::~GrammarEnvironment() {
  library_.free_tokenizer(tokenizer_);
}

std::size_t GrammarEnvironment::tokenize(const void* self, const std::uint8_t* bytes, std::size_t num_bytes,
                                         std::uint32_t* tokens, std::size_t capacity) noexcept {
  const std::string_view text(reinterpret_cast<const char*>(bytes), std::min(num_bytes, kMaxTokenizedBytes));
  const std::vector<TokenId> ids = static_cast<const GrammarEnvironment*>(self)->byte_pairs_->tokenize(text);
  std::copy_n(ids.begin(), std::min(ids.size(), capacity), tokens);
  return ids.size();
}

void GrammarState::fill_mask(std::span<std::uint32_t> mask) {
  const std::vector<std::uint32_t>& allowed = environment().allowed();
  if (mask.size() != allowed.size()) {
    throw Error(ErrorKind::kInternal,
                cat("a grammar's mask has ", allowed.size(), " words; the batch gave it ", mask.size()));
  }
  if (library().matcher_compute_mask_into(matcher_.get(), mask.data(), mask.size_bytes()) < 0) {
    throw Error(ErrorKind::kInvalidRequest, cat("the grammar of ", param_, " cannot go on: ", error()), param_);
  }
  // Lark grammars can name tokens by id; what is no text stays out all the same.
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    mask[i] &= allowed[i];
    any |= mask[i];
  }
  if (any == 0) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("the grammar of ", param_, " cannot go on: the model has no token that it would allow"), param_);
  }
}

void GrammarState::accept(TokenId token) {
  if (library().matcher_consume_token(matcher_.get(), static_cast<std::uint32_t>(token)) >= 0) return;
  const std::string reason = error();
  // llguidance bounds what it builds while it goes; a mask may still have room, and the token after it none.
  if (reason.find("too many") != std::string::npos || reason.find("limit") != std::string::npos) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("the grammar of ", param_, " is too large to go on: ", reason, "; simplify it"), param_);
  }
  throw Error(ErrorKind::kInternal, cat("the grammar of ", param_, " does not allow token ", token, ": ", reason));
}

std::vector<TokenId> GrammarState::take_forced(std::int32_t limit) {
  if (limit <= 0 || library().matcher_is_stopped(matcher_.get())) {
    return {};
  }
  std::vector<std::uint32_t> tokens(static_cast<std::size_t>(limit));
  const std::int32_t count = library().matcher_compute_ff_tokens(matcher_.get(), tokens.data(), tokens.size());
  if (count <= 0) {
    return {};  // a failure shows in the next mask
  }
  tokens.resize(static_cast<std::size_t>(count));
  if (library().matcher_consume_tokens(matcher_.get(), tokens.data(), tokens.size()) < 0) {
    throw Error(ErrorKind::kInternal, cat("the grammar of ", param_, " refuses what it forces: ", error()));
  }
  return {tokens.begin(), tokens.end()};
}

bool GrammarState::finished() const {
  return library().matcher_is_stopped(matcher_.get()) && !library().matcher_is_error(matcher_.get());
}

std::unique_ptr<Constraint> GrammarState::clone() const {
  return std::make_unique<GrammarState>(MatcherPtr(library().clone_matcher(matcher_.get()), matcher_.get_deleter()),
                                        param_);
}

std::string GrammarState::error() const {
  return plain_reason(library().matcher_get_error(matcher_.get()));
}

}  // namespace aotllm
