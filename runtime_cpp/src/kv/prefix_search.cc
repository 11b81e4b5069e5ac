#include "kv/prefix_search.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace aotllm {
namespace {

std::int32_t common_prefix(std::span<const TokenId> a, std::span<const TokenId> b) {
  return static_cast<std::int32_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

/// One search. Lengths are tried from the longest on: a number of full nodes, with and without a partial one.
class PrefixSearch {
 public:
  PrefixSearch(const KvStore& store, const PrefixKeys& keys, std::span<const TokenId> tokens, std::int32_t max_tokens)
      : store_(store), tokens_(tokens), max_tokens_(max_tokens), block_size_(store.tree().tokens_per_block()) {
    root_ = store.tree().root(keys.realm());
    const std::size_t usable = static_cast<std::size_t>(max_tokens / block_size_) + 1;  // the last one as partial node
    const std::size_t full = tokens.size() / static_cast<std::size_t>(block_size_);
    path_ = store.tree().walk(root_, keys.blocks().first(std::min({usable, full, keys.blocks().size()})), tokens);
    depth_ = std::min(static_cast<std::int32_t>(path_.size()), max_tokens / block_size_);
    for (int group = 0; group < store.num_groups(); ++group) {
      if (store.is_full_attention(group)) {
        num_used_[static_cast<std::size_t>(group)] = count_used(group);
        depth_ = std::min(depth_, num_used(group) + store.device(group).num_available());
      }
    }
  }

  FoundPrefix run() && {
    while (depth_ > 0 || root_ != kNoNode) {
      // A gap that even the longest partial match sees rules out all depths down to it: shorter ones see further back.
      std::int32_t gap = last_gap(block_size_ - 1);
      if (gap < 0) {
        if (const auto [match, partial] = with_partial(); partial != kNoNode) {
          return finish(match, partial);
        }
        gap = last_gap(0);
        if (const auto match = gap < 0 ? affordable(depth_ * block_size_, kNoNode) : std::nullopt) {
          return finish(*match, kNoNode);
        }
      }
      depth_ = gap < 0 ? depth_ - 1 : gap;
    }
    return {};
  }

 private:
  std::int32_t num_used(int group) const { return num_used_[static_cast<std::size_t>(group)]; }
  BlockRange range(int group, std::int32_t num_tokens) const {
    const std::int32_t window = store_.config().groups[static_cast<std::size_t>(group)].window;
    return blocks_in_step(num_tokens, num_tokens, window, block_size_);
  }
  NodeId node(std::int32_t index) const { return path_[static_cast<std::size_t>(index)]; }
  bool is_unused(NodeId node, int group) const {
    return !store_.on_device(node, group) || store_.device(group).references(store_.block(node, group)) == 0;
  }

  /// Nodes of the path whose blocks sequences refer to: they come first, for who refers to one refers to all before it.
  std::int32_t count_used(int group) const {
    const auto end = std::ranges::partition_point(path_, [&](NodeId node) { return !is_unused(node, group); });
    return static_cast<std::int32_t>(end - path_.begin());
  }

  /// The last block before depth_ that is missing where a match `partial` tokens behind depth_ sees it; -1 if none is.
  std::int32_t last_gap(std::int32_t partial) const {
    std::int32_t gap = -1;
    for (int group = 0; group < store_.num_groups(); ++group) {
      const std::int32_t begin = range(group, depth_ * block_size_ + partial).begin;
      for (std::int32_t i = depth_ - 1; !store_.is_full_attention(group) && i >= std::max(begin, gap + 1); --i) {
        if (!store_.has_block(node(i), group)) {
          gap = i;
        }
      }
    }
    return gap;
  }

  /// The match of depth_ nodes and the first tokens of `partial`, if the blocks that it takes are available.
  std::optional<PrefixMatch> affordable(std::int32_t num_tokens, NodeId partial) const {
    PrefixMatch match{.num_tokens = num_tokens};
    for (int group = 0; group < store_.num_groups(); ++group) {
      const auto g = static_cast<std::size_t>(group);
      const BlockRange taken = range(group, num_tokens);
      match.num_blocks[g] = taken.size();
      if (store_.is_full_attention(group)) {
        match.cost[g] = depth_ - std::min(depth_, num_used(group));
      } else {
        for (std::int32_t i = taken.begin; i < depth_; ++i) {
          match.cost[g] += is_unused(node(i), group) ? 1 : 0;
        }
      }
      std::int32_t source = 0;  // must not be evicted to make room for its own copy
      if (partial != kNoNode) {
        match.cost[g] += 1;
        source = store_.on_device(partial, group) && is_unused(partial, group) ? 1 : 0;
      }
      if (match.cost[g] + source > store_.device(group).num_available()) {
        return std::nullopt;
      }
    }
    return match;
  }

  /// The longest match that depth_ nodes and a part of another one make, and that one; kNoNode if there is none.
  std::pair<PrefixMatch, NodeId> with_partial() const {
    const auto begin = static_cast<std::size_t>(depth_) * static_cast<std::size_t>(block_size_);
    const std::int32_t room = std::min(max_tokens_ - depth_ * block_size_, block_size_ - 1);
    std::pair<PrefixMatch, NodeId> best{{}, kNoNode};
    if (room < 1) {
      return best;
    }
    const std::span<const TokenId> wanted = tokens_.subspan(begin, static_cast<std::size_t>(room));
    std::int32_t longest = 0;
    const auto consider = [&](NodeId child) {
      const std::int32_t common = common_prefix(wanted, store_.tree().tokens(child));
      if (common <= longest || !is_complete(child) || last_gap(common) >= 0) {
        return;
      }
      if (const auto match = affordable(depth_ * block_size_ + common, child)) {
        longest = common;
        best = {*match, child};
      }
    };
    if (depth_ < static_cast<std::int32_t>(path_.size())) {
      consider(node(depth_));
    }
    NodeId child = store_.tree()[depth_ == 0 ? root_ : node(depth_ - 1)].first_child;
    for (int i = 0; i < kMaxSiblings && child != kNoNode && longest < room; ++i, child = store_.tree()[child].next) {
      consider(child);
    }
    return best;
  }

  bool is_complete(NodeId node) const {
    for (int group = 0; group < store_.num_groups(); ++group) {
      if (!store_.has_block(node, group)) {
        return false;
      }
    }
    return true;
  }

  FoundPrefix finish(const PrefixMatch& match, NodeId partial) {
    path_.resize(static_cast<std::size_t>(depth_));
    return {match, std::move(path_), partial};
  }

  const KvStore& store_;
  std::span<const TokenId> tokens_;
  std::int32_t max_tokens_;
  std::int32_t block_size_;
  NodeId root_ = kNoNode;
  std::vector<NodeId> path_;
  BlockCounts num_used_{};  ///< by group, full attention only: nodes of the path that are in use
  std::int32_t depth_ = 0;  ///< full nodes of the match that is tried
};

}  // namespace

FoundPrefix find_prefix(const KvStore& store, const PrefixKeys& keys, std::span<const TokenId> tokens,
                        std::int32_t limit) {
  const std::int32_t max_tokens = std::min(limit, static_cast<std::int32_t>(tokens.size()) - 1);
  return max_tokens < 1 ? FoundPrefix{} : PrefixSearch(store, keys, tokens, max_tokens).run();
}

}  // namespace aotllm
