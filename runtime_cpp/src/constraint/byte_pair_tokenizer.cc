#include "constraint/byte_pair_tokenizer.h"

#include <algorithm>
#include <cstddef>
#include <queue>
#include <tuple>

namespace aotllm {
namespace {

/// A piece of the text, in a doubly linked list of pieces. Joined pieces live on in the left one.
struct Piece {
  std::size_t begin;
  std::size_t size;  ///< 0 = joined to another
  std::size_t previous;
  std::size_t next;
};
constexpr std::size_t kEnd = static_cast<std::size_t>(-1);

/// Two neighbours that make a token. Stale once one of them has changed.
struct Join {
  TokenId token;
  std::size_t left;
  std::size_t size;

  bool operator<(const Join& other) const {  // a priority_queue gives the largest first
    return std::tie(other.token, other.left, other.size) < std::tie(token, left, size);
  }
};

/// Length of the UTF-8 character that starts with `byte`; 1 for bytes that start none.
std::size_t character_size(char byte) {
  const auto value = static_cast<unsigned char>(byte);
  if (value < 0xC0) return 1;
  if (value < 0xE0) return 2;
  return value < 0xF0 ? 3 : 4;
}

}  // namespace

BytePairTokenizer::BytePairTokenizer(std::span<const std::string> tokens) : storage_(tokens.begin(), tokens.end()) {
  ids_.reserve(storage_.size());
  for (std::size_t id = 0; id < storage_.size(); ++id) {
    if (!storage_[id].empty()) {
      ids_[storage_[id]] = static_cast<TokenId>(id);
    }
  }
}

TokenId BytePairTokenizer::find(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  return found == ids_.end() ? kNone : found->second;
}

std::vector<TokenId> BytePairTokenizer::tokenize(std::string_view text) const {
  // The first pieces are characters, or bytes where the vocabulary lacks the character.
  std::vector<Piece> pieces;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t size = std::min(character_size(text[begin]), text.size() - begin);
    if (find(text.substr(begin, size)) == kNone) {
      size = 1;
    }
    const std::size_t index = pieces.size();
    pieces.push_back({begin, size, index == 0 ? kEnd : index - 1, index + 1});
    begin += size;
  }
  if (pieces.empty()) {
    return {};
  }
  pieces.back().next = kEnd;

  std::priority_queue<Join> joins;
  const auto consider = [&](std::size_t left) {
    if (left == kEnd || pieces[left].next == kEnd) {
      return;
    }
    const std::size_t size = pieces[left].size + pieces[pieces[left].next].size;
    const TokenId token = find(text.substr(pieces[left].begin, size));
    if (token != kNone) {
      joins.push({token, left, size});
    }
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    consider(i);
  }
  while (!joins.empty()) {
    const Join join = joins.top();
    joins.pop();
    Piece& left = pieces[join.left];
    if (left.size == 0 || left.next == kEnd || left.size + pieces[left.next].size != join.size) {
      continue;  // stale
    }
    Piece& right = pieces[left.next];
    left.size = join.size;
    left.next = right.next;
    right.size = 0;
    if (left.next != kEnd) {
      pieces[left.next].previous = join.left;
    }
    consider(left.previous);
    consider(join.left);
  }

  std::vector<TokenId> result;
  for (std::size_t i = 0; i != kEnd; i = pieces[i].next) {
    const TokenId token = find(text.substr(pieces[i].begin, pieces[i].size));
    if (token != kNone) {
      result.push_back(token);
    }
  }
  return result;
}

}  // namespace aotllm
