#include "tokenization/compact_tokens.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <queue>
#include <tuple>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr std::uint32_t kFree = 0xFFFFFFFF;  ///< of a slot
constexpr std::int32_t kNone = -1;

/// CRC-32 as in zlib, by which the builder fills the slots of tokens.
std::uint32_t crc32(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320u : 0);
      table[i] = value;
    }
    return table;
  }();
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint8_t>(c)) & 0xFF];
  return ~crc;
}

/// Golden-ratio hash of a pair, by which the builder fills the slots of merges.
std::size_t pair_slot(std::uint32_t left, std::uint32_t right, std::size_t slots) {
  const std::uint64_t pair = (std::uint64_t{left} << 32) | right;
  return static_cast<std::size_t>((pair * 0x9E3779B97F4A7C15ull) >> (64 - std::countr_zero(slots)));
}

/// GPT-2's spelling of bytes, in UTF-8: printable Latin-1 stands for itself, the other 68 for U+0100 and up.
const std::array<std::string, 256>& byte_alphabet() {
  static const auto kAlphabet = [] {
    std::array<std::string, 256> alphabet;
    std::uint32_t next = 0x100;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte < 0x7F) || (byte >= 0xA1 && byte < 0xAD) || (byte >= 0xAE && byte < 0x100);
      const std::uint32_t point = printable ? byte : next++;
      if (point < 0x80) {
        alphabet[byte] = std::string(1, static_cast<char>(point));
      } else {
        alphabet[byte] = {static_cast<char>(0xC0 | (point >> 6)), static_cast<char>(0x80 | (point & 0x3F))};
      }
    }
    return alphabet;
  }();
  return kAlphabet;
}

/// Bytes of the UTF-8 character that starts with `byte`.
std::size_t character_size(char byte) {
  const auto value = static_cast<std::uint8_t>(byte);
  if (value < 0xC0) return 1;
  if (value < 0xE0) return 2;
  return value < 0xF0 ? 3 : 4;
}

[[noreturn]] void damaged(const std::string& name, const std::string& what) {
  throw Error(ErrorKind::kEngine, cat(name, ": ", what, "; the file is damaged, build the engine again"));
}

}  // namespace

/// A word while it is merged: a list in one vector. A merged pair lives on in its left symbol.
struct CompactTokens::Symbols {
  struct Symbol {
    TokenId id;  ///< kNone = merged into another one
    std::int32_t previous;
    std::int32_t next;
  };
  struct Candidate {
    std::uint32_t rank;
    std::int32_t left;
    TokenId merged;

    bool operator<(const Candidate& other) const {  // a priority_queue gives the largest first
      return std::tie(other.rank, other.left) < std::tie(rank, left);
    }
  };

  void append(TokenId id) {
    const auto index = static_cast<std::int32_t>(list.size());
    if (!list.empty()) list.back().next = index;
    list.push_back({id, index - 1, kNone});
  }

  std::vector<Symbol> list;
};

CompactTokens::CompactTokens(const std::string& path) : file_(path), tensors_(SafeTensors::parse(file_.bytes(), path)) {
  offsets_ = array<std::uint32_t>("offsets");
  text_ = array<std::uint8_t>("text");
  flags_ = array<std::uint8_t>("flags");
  token_slots_ = array<std::uint32_t>("token_slots");
  merge_slots_ = array<std::uint32_t>("merge_slots");
  merges_ = array<Merge>("merges");
  size_ = static_cast<std::int64_t>(flags_.size());
  if (offsets_.size() != flags_.size() + 1 || offsets_.back() != text_.size() ||
      !std::is_sorted(offsets_.begin(), offsets_.end())) {
    damaged(path, "the tokens' offsets do not fit their text");
  }
  // A free slot ends every search.
  for (const auto slots : {token_slots_, merge_slots_}) {
    if (!std::has_single_bit(slots.size()) || slots.size() < 2) damaged(path, "a table's size is no power of two");
  }
  const std::string& kind = tensors_.metadata("words");
  byte_level_ = kind == "byte_level";
  if (!byte_level_ && kind != "byte_fallback") damaged(path, cat("words \"", kind, "\" are of no known kind"));
  whole_words_ = tensors_.metadata("whole_words") == "true";
  space_ = byte_level_ ? "" : tensors_.metadata("space");
}

template <class T>
std::span<const T> CompactTokens::array(std::string_view tensor) const {
  const std::span<const std::uint8_t> bytes = tensors_.tensor(tensor).bytes;
  if (bytes.size() % sizeof(T) != 0) damaged(tensors_.name(), cat("\"", tensor, "\" ends within an element"));
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

std::string_view CompactTokens::text(std::string_view tensor) const {
  const auto bytes = tensors_.tensor(tensor).bytes;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<std::string_view> CompactTokens::spelling(std::int64_t id) const {
  if (id < 0 || id >= size_) return std::nullopt;
  const auto index = static_cast<std::size_t>(id);
  const std::size_t begin = offsets_[index];
  const std::size_t size = offsets_[index + 1] - begin;
  if (size == 0) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(text_.data()) + begin, size);
}

std::optional<TokenId> CompactTokens::find(std::string_view wanted) const {
  const std::size_t mask = token_slots_.size() - 1;
  std::size_t slot = crc32(wanted) & mask;
  for (std::size_t probes = 0; probes <= mask && token_slots_[slot] != kFree; ++probes) {
    if (spelling(token_slots_[slot]) == wanted) return static_cast<TokenId>(token_slots_[slot]);
    slot = (slot + 1) & mask;
  }
  return std::nullopt;
}

std::optional<TokenId> CompactTokens::find_in_model(std::string_view wanted) const {
  const std::optional<TokenId> id = find(wanted);
  const bool known = id.has_value() && (flags_[static_cast<std::size_t>(*id)] & kTokenOfModel) != 0;
  return known ? id : std::nullopt;
}

std::vector<TokenId> CompactTokens::with_flags(std::uint8_t flags) const {
  std::vector<TokenId> ids;
  for (std::size_t id = 0; id < flags_.size(); ++id) {
    if ((flags_[id] & flags) == flags) ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

std::optional<CompactTokens::Found> CompactTokens::merge_of(TokenId left, TokenId right) const {
  const std::size_t mask = merge_slots_.size() - 1;
  std::size_t slot = pair_slot(static_cast<std::uint32_t>(left), static_cast<std::uint32_t>(right), mask + 1);
  for (std::size_t probes = 0; probes <= mask && merge_slots_[slot] != kFree; ++probes) {
    const std::uint32_t rank = merge_slots_[slot];
    if (rank >= merges_.size()) damaged(tensors_.name(), cat("there is no merge ", rank));
    const Merge& merge = merges_[rank];
    if (merge.left == left && merge.right == right) return Found{rank, merge.merged};
    slot = (slot + 1) & mask;
  }
  return std::nullopt;
}

TokenId CompactTokens::id_of_byte_token(std::uint8_t byte) const {
  static constexpr std::string_view kDigits = "0123456789ABCDEF";
  const std::string name = {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
  const std::optional<TokenId> id = find_in_model(name);
  if (!id) damaged(tensors_.name(), cat("there is no token ", name));
  return *id;
}

std::string CompactTokens::spelled(std::string_view word) const {
  std::string spelling;
  for (const char c : word) {
    if (byte_level_) {
      spelling += byte_alphabet()[static_cast<std::uint8_t>(c)];
    } else if (c == ' ') {
      spelling += space_;
    } else {
      spelling += c;
    }
  }
  return spelling;
}

/// The symbols that a word begins with: its characters, or bytes where the vocabulary lacks the character. A byte that
/// has no token either is left out, as in the original.
void CompactTokens::start(std::string_view spelling, Symbols& symbols) const {
  symbols.list.reserve(spelling.size());
  for (std::size_t begin = 0; begin < spelling.size();) {
    const std::size_t size = std::min(character_size(spelling[begin]), spelling.size() - begin);
    const std::string_view character = spelling.substr(begin, size);
    if (const std::optional<TokenId> id = find_in_model(character)) {
      symbols.append(*id);
    } else if (!byte_level_) {
      for (const char c : character) symbols.append(id_of_byte_token(static_cast<std::uint8_t>(c)));
    }
    begin += size;
  }
}

void CompactTokens::encode(std::string_view word, std::vector<TokenId>& ids) const {
  const std::string spelling = spelled(word);
  if (whole_words_) {
    if (const std::optional<TokenId> id = find_in_model(spelling)) {
      ids.push_back(*id);
      return;
    }
  }
  Symbols symbols;
  start(spelling, symbols);
  auto& list = symbols.list;
  std::priority_queue<Symbols::Candidate> candidates;
  const auto consider = [&](std::int32_t left) {
    if (left == kNone || list[left].next == kNone) return;
    if (const auto found = merge_of(list[left].id, list[list[left].next].id)) {
      candidates.push({found->rank, left, found->merged});
    }
  };
  for (std::size_t i = 0; i < list.size(); ++i) consider(static_cast<std::int32_t>(i));
  while (!candidates.empty()) {
    const Symbols::Candidate best = candidates.top();
    candidates.pop();
    Symbols::Symbol& left = list[best.left];
    if (left.id == kNone || left.next == kNone) continue;
    // One of the two may have changed since. As in the original, another pair that makes the same token will do.
    const auto found = merge_of(left.id, list[left.next].id);
    if (!found || found->merged != best.merged) continue;
    Symbols::Symbol& right = list[left.next];
    left.id = best.merged;
    left.next = right.next;
    right.id = kNone;
    if (left.next != kNone) list[left.next].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  for (std::int32_t i = list.empty() ? kNone : 0; i != kNone; i = list[i].next) ids.push_back(list[i].id);
}

}  // namespace aotllm
