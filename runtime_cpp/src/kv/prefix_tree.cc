#include "kv/prefix_tree.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

/// Blocks by which `walk` reads ahead: far enough to hide a miss of the last-level cache.
constexpr std::size_t kNodeAhead = 8;
constexpr std::size_t kBucketAhead = 2 * kNodeAhead;

void require(bool holds, NodeId node, const char* rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, "prefix tree, node " + std::to_string(node) + ": " + rule);
  }
}

}  // namespace

PrefixTree::PrefixTree(std::int32_t tokens_per_block, std::size_t expected_nodes)
    : tokens_per_block_(tokens_per_block), buckets_(std::bit_ceil(std::max<std::size_t>(expected_nodes, 8)), kNoNode) {
  nodes_.reserve(expected_nodes);
  tokens_.reserve(expected_nodes * static_cast<std::size_t>(tokens_per_block));
  free_.reserve(expected_nodes);
}

std::size_t PrefixTree::RealmHash::operator()(const PrefixRealm& realm) const noexcept {
  return std::hash<std::string>{}(realm.salt) ^ static_cast<std::size_t>(realm.adapter) * 0x9E3779B97F4A7C15;
}

NodeId PrefixTree::root(const PrefixRealm& realm) const {
  const auto found = roots_.find(realm);
  return found == roots_.end() ? kNoNode : found->second;
}

NodeId PrefixTree::root_or_new(const PrefixRealm& realm) {
  if (const NodeId found = root(realm); found != kNoNode) {
    return found;
  }
  reserve(1);
  const auto entry = roots_.emplace(realm, kNoNode).first;
  entry->second = take_node();
  (*this)[entry->second].realm = &entry->first;  // keys of an unordered_map stay where they are
  return entry->second;
}

bool PrefixTree::matches(NodeId node, NodeId parent, std::uint64_t key, std::span<const TokenId> block) const {
  const PrefixNode& found = (*this)[node];
  return found.key == key && found.parent == parent && std::ranges::equal(tokens(node), block);
}

NodeId PrefixTree::find(NodeId parent, std::uint64_t key, std::span<const TokenId> block) const {
  NodeId node = buckets_[bucket(key)];
  while (node != kNoNode && !matches(node, parent, key, block)) {
    node = (*this)[node].next_in_bucket;
  }
  return node;
}

void PrefixTree::prefetch(NodeId node) const {
  const TokenId* const tokens = tokens_.data() + static_cast<std::ptrdiff_t>(node) * tokens_per_block_;
  __builtin_prefetch(&(*this)[node]);
  __builtin_prefetch(tokens);
  __builtin_prefetch(tokens + tokens_per_block_ - 1);
}

void PrefixTree::prefetch(std::span<const std::uint64_t> keys, std::size_t i) const {
  if (i + kBucketAhead < keys.size()) {
    __builtin_prefetch(&buckets_[bucket(keys[i + kBucketAhead])]);
  }
  if (i + kNodeAhead < keys.size()) {
    if (const NodeId ahead = buckets_[bucket(keys[i + kNodeAhead])]; ahead != kNoNode) {
      prefetch(ahead);
    }
  }
}

/// Nodes that were added in a row, as those of a prompt are, have ids in a row: while that holds the next id is tried
/// before the table, and a cache line less is waited for.
std::vector<NodeId> PrefixTree::walk(NodeId root, std::span<const std::uint64_t> keys,
                                     std::span<const TokenId> tokens) const {
  const auto block_size = static_cast<std::size_t>(tokens_per_block_);
  const auto end = static_cast<NodeId>(nodes_.size());
  std::vector<NodeId> path;
  NodeId node = root;
  bool in_row = true;
  for (std::size_t i = 0; node != kNoNode && i < keys.size(); ++i) {
    const std::span<const TokenId> block = tokens.subspan(i * block_size, block_size);
    const NodeId guess = node + 1;
    if (in_row && guess < end && matches(guess, node, keys[i], block)) {
      node = guess;
      prefetch(std::min(node + static_cast<NodeId>(kNodeAhead), end - 1));
    } else {
      prefetch(keys, i);
      node = find(node, keys[i], block);
      in_row = node == guess;
    }
    if (node != kNoNode) {
      path.push_back(node);
    }
  }
  return path;
}

void PrefixTree::reserve(std::size_t nodes) {
  const std::size_t needed = nodes_.size() - std::min(free_.size(), nodes) + nodes;
  if (needed > nodes_.capacity()) {
    const std::size_t capacity = std::max(needed, 2 * nodes_.capacity());
    tokens_.reserve(capacity * static_cast<std::size_t>(tokens_per_block_));
    free_.reserve(capacity);  // so that `remove` does not throw either
    rehash(std::bit_ceil(capacity));
    nodes_.reserve(capacity);
  }
}

NodeId PrefixTree::take_node() {
  if (!free_.empty()) {
    const NodeId node = free_.back();
    free_.pop_back();
    return node;
  }
  nodes_.emplace_back();
  tokens_.resize(nodes_.size() * static_cast<std::size_t>(tokens_per_block_));
  return static_cast<NodeId>(nodes_.size()) - 1;
}

NodeId PrefixTree::add(NodeId parent, std::uint64_t key, std::span<const TokenId> block) {
  reserve(1);
  const NodeId node = take_node();
  PrefixNode& added = (*this)[node];
  added.key = key;
  added.realm = (*this)[parent].realm;
  added.parent = parent;
  added.num_tokens = static_cast<std::int32_t>(block.size());
  std::ranges::copy(block, tokens_.begin() + static_cast<std::ptrdiff_t>(node) * tokens_per_block_);
  link_first(node);
  if (is_full(node)) {
    index(node);
  }
  return node;
}

void PrefixTree::remove(NodeId node) {
  if (is_root(node)) {
    roots_.erase(roots_.find(*(*this)[node].realm));
  } else {
    unlink(node);
  }
  if (is_full(node)) {
    NodeId* link = &buckets_[bucket((*this)[node].key)];
    while (*link != node) {
      link = &(*this)[*link].next_in_bucket;
    }
    *link = (*this)[node].next_in_bucket;
  }
  (*this)[node] = PrefixNode{};
  free_.push_back(node);
}

void PrefixTree::move_to_front(NodeId node) {
  if ((*this)[node].previous != kNoNode) {
    unlink(node);
    link_first(node);
  }
}

void PrefixTree::clear() {
  std::ranges::fill(buckets_, kNoNode);
  roots_.clear();
  nodes_.clear();
  tokens_.clear();
  free_.clear();
}

std::span<const TokenId> PrefixTree::tokens(NodeId node) const {
  const auto block_size = static_cast<std::size_t>(tokens_per_block_);
  return std::span(tokens_).subspan(static_cast<std::size_t>(node) * block_size,
                                    static_cast<std::size_t>((*this)[node].num_tokens));
}

void PrefixTree::index(NodeId node) {
  NodeId& first = buckets_[bucket((*this)[node].key)];
  (*this)[node].next_in_bucket = first;
  first = node;
}

void PrefixTree::rehash(std::size_t num_buckets) {
  std::vector<NodeId> buckets(num_buckets, kNoNode);
  buckets_.swap(buckets);
  for (NodeId node = 0; node < static_cast<NodeId>(nodes_.size()); ++node) {
    if (is_full(node)) {
      index(node);
    }
  }
}

void PrefixTree::link_first(NodeId node) {
  PrefixNode& linked = (*this)[node];
  NodeId& first = (*this)[linked.parent].first_child;
  linked.previous = kNoNode;
  linked.next = first;
  if (first != kNoNode) {
    (*this)[first].previous = node;
  }
  first = node;
}

void PrefixTree::unlink(NodeId node) {
  const PrefixNode& linked = (*this)[node];
  (linked.previous == kNoNode ? (*this)[linked.parent].first_child : (*this)[linked.previous].next) = linked.next;
  if (linked.next != kNoNode) {
    (*this)[linked.next].previous = linked.previous;
  }
}

std::vector<NodeId> PrefixTree::nodes() const {
  std::vector<NodeId> found;
  for (const auto& [realm, root] : roots_) {
    found.push_back(root);
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (NodeId child = (*this)[found[i]].first_child; child != kNoNode; child = (*this)[child].next) {
      found.push_back(child);
    }
  }
  return found;
}

void PrefixTree::check_invariants() const {
  const std::vector<NodeId> reachable = nodes();
  require(static_cast<std::int32_t>(reachable.size()) == num_nodes(), kNoNode, "nodes are out of reach of the roots");
  for (const NodeId node : reachable) {
    const PrefixNode& checked = (*this)[node];
    require(checked.realm != nullptr, node, "no realm");
    if (is_root(node)) {
      require(root(*checked.realm) == node && checked.num_tokens == 0, node, "a root that its realm does not lead to");
    } else {
      require(checked.num_tokens > 0 && checked.num_tokens <= tokens_per_block_, node, "number of tokens");
      require(checked.realm == (*this)[checked.parent].realm, node, "another realm than its parent");
    }
    if (is_full(node)) {
      require(find(checked.parent, checked.key, tokens(node)) == node, node, "not the one that its key leads to");
    } else {
      require(is_root(node) || checked.first_child == kNoNode, node, "a partial node with children");
    }
    NodeId previous = kNoNode;
    for (NodeId child = checked.first_child; child != kNoNode; child = (*this)[child].next) {
      require((*this)[child].parent == node && (*this)[child].previous == previous, child, "links of siblings");
      previous = child;
    }
  }
}

}  // namespace aotllm
