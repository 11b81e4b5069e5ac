#include "kv/kv_store.h"

#include <algorithm>
#include <string>
#include <utility>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

std::int32_t checked(const char* name, std::int32_t value, std::int32_t least) {
  if (value < least) {
    throw Error(ErrorKind::kInternal, std::string("KV cache: ") + name + " is " + std::to_string(value) +
                                          "; it must be ≥ " + std::to_string(least));
  }
  return value;
}

KvCacheConfig checked(const KvCacheConfig& config) {
  checked("tokens_per_block", config.tokens_per_block, 1);
  checked("max_events", config.max_events, 0);
  if (config.groups.empty() || config.groups.size() > kMaxKvGroups) {
    throw Error(ErrorKind::kInternal, "KV cache: " + std::to_string(config.groups.size()) + " groups; 1 to " +
                                          std::to_string(kMaxKvGroups) + " are possible");
  }
  for (const KvGroupConfig& group : config.groups) {
    checked("window", group.window, 0);
    checked("num_blocks", group.num_blocks, 1);
    checked("num_host_blocks", group.num_host_blocks, 0);
  }
  return config;
}

/// Nodes in a tree whose blocks are all in use or cached.
std::size_t expected_nodes(const KvCacheConfig& config) {
  std::size_t most = 0;
  for (const KvGroupConfig& group : config.groups) {
    most = std::max(most, static_cast<std::size_t>(group.num_blocks) + static_cast<std::size_t>(group.num_host_blocks));
  }
  return most + 1;
}

bool begins_with(std::span<const TokenId> tokens, std::span<const TokenId> prefix) {
  return tokens.size() >= prefix.size() && std::ranges::equal(tokens.first(prefix.size()), prefix);
}

}  // namespace

KvStore::KvStore(const KvCacheConfig& config)
    : config_(checked(config)), tree_(config.tokens_per_block, expected_nodes(config)), events_(config.max_events) {
  for (const KvGroupConfig& group : config.groups) {
    device_.emplace_back(group.num_blocks);
    host_.emplace_back(group.num_host_blocks);
  }
}

void KvStore::reserve_copies(std::size_t blocks) {
  const std::size_t needed = copies_.size() + 2 * blocks;  // a block moves out, and a copy moves in
  if (needed > copies_.capacity()) {
    copies_.reserve(std::max(needed, 2 * copies_.capacity()));
  }
}

std::vector<BlockCopy> KvStore::take_copies() {
  return std::exchange(copies_, {});
}

BlockId KvStore::take(int group) {
  if (device(group).num_unused() == 0) {
    evict(group);
  }
  return device(group).take_free();
}

void KvStore::evict(int group) {
  const BlockId victim = device(group).victim();
  if (victim == kNoBlock) {
    throw Error(ErrorKind::kInternal, "no free KV block of " + std::to_string(device(group).num_blocks()) +
                                          " in group " + std::to_string(group));
  }
  const NodeId node = device(group).node(victim);
  const BlockId host_block = take_host(group);
  if (host_block == kNoBlock) {
    lose(node, group);
    return;
  }
  copies_.push_back({group, KvTier::kDevice, victim, KvTier::kHost, host_block});
  device(group).clear_node(victim);
  set_block(node, group, KvTier::kHost, host_block);
  unpin(node, group);
  ++stats_.offloaded_blocks;
  events_.add(KvEvent::Kind::kMoved, tree_, node, group);
}

BlockId KvStore::take_host(int group) {
  BlockPool& pool = host_[static_cast<std::size_t>(group)];
  if (pool.num_unused() == 0 && pool.num_cached() > 0) {
    lose(pool.node(pool.victim()), group);
  }
  return pool.take_free();
}

/// The block of a leaf on its tier is given up. Without its block of full attention a node serves nobody.
void KvStore::lose(NodeId node, int group) {
  if (is_full_attention(group)) {
    for (int g = 0; g < num_groups(); ++g) {
      stats_.evicted_blocks += has_block(node, g) ? 1 : 0;
    }
    drop(node);
  } else {
    ++stats_.evicted_blocks;
    detach(node, group);
    remove_if_empty(node);
  }
}

void KvStore::detach(NodeId node, int group) {
  events_.add(KvEvent::Kind::kRemoved, tree_, node, group);
  pool(node, group).clear_node(block(node, group));
  tree_[node].blocks[static_cast<std::size_t>(group)] = kNoBlock;
}

void KvStore::drop(NodeId node) {
  if (tree_[node].first_child != kNoNode || tree_[node].holders != 0) {
    throw Error(ErrorKind::kInternal, "KV cache: a node with children, or in use, is to be dropped");
  }
  for (int group = 0; group < num_groups(); ++group) {
    if (has_block(node, group)) {
      detach(node, group);
    }
  }
  remove_if_empty(node);
}

void KvStore::set_block(NodeId node, int group, KvTier tier, BlockId block) {
  tree_[node].blocks[static_cast<std::size_t>(group)] = block;
  const auto bit = static_cast<std::uint8_t>(1U << group);
  std::uint8_t& on_host = tree_[node].on_host;
  on_host = static_cast<std::uint8_t>(tier == KvTier::kHost ? on_host | bit : on_host & ~bit);
  pool(node, group).set_node(block, node, tree_[node].retention);
}

BlockId KvStore::onload(NodeId node, int group) {
  const BlockId to = take(group);
  const BlockId from = block(node, group);
  copy_to(node, group, to);
  pool(node, group).clear_node(from);
  unpin(node, group);
  set_block(node, group, KvTier::kDevice, to);
  ++stats_.onloaded_blocks;
  events_.add(KvEvent::Kind::kMoved, tree_, node, group);
  return to;
}

void KvStore::copy_to(NodeId node, int group, BlockId to) {
  copies_.push_back({group, tier(node, group), block(node, group), KvTier::kDevice, to});
}

void KvStore::attach(NodeId node, int group, BlockId block) {
  const bool moved = has_block(node, group);
  if (moved) {
    pool(node, group).clear_node(this->block(node, group));
  }
  set_block(node, group, KvTier::kDevice, block);
  stats_.stored_blocks += !moved && tree_.is_full(node) ? 1 : 0;
  events_.add(moved ? KvEvent::Kind::kMoved : KvEvent::Kind::kStored, tree_, node, group);
}

NodeId KvStore::add(NodeId parent, std::uint64_t key, std::span<const TokenId> block) {
  const NodeId added = tree_.add(parent, key, block);
  NodeId sibling = tree_[added].next;
  for (int i = 1; i < kMaxSiblings && sibling != kNoNode; ++i) {
    const NodeId next = tree_[sibling].next;
    if (!tree_.is_full(sibling) && begins_with(block, tree_.tokens(sibling))) {
      drop(sibling);
    }
    sibling = next;
  }
  return added;
}

NodeId KvStore::find_beginning(NodeId parent, std::span<const TokenId> tokens) const {
  NodeId child = tree_[parent].first_child;
  for (int i = 0; i < kMaxSiblings && child != kNoNode; ++i, child = tree_[child].next) {
    if (begins_with(tree_.tokens(child), tokens)) {
      return child;
    }
  }
  return kNoNode;
}

void KvStore::raise_retention(NodeId node, std::int32_t retention) {
  for (; !tree_.is_root(node) && tree_[node].retention < retention; node = tree_[node].parent) {
    tree_[node].retention = static_cast<std::int8_t>(retention);
    for (int group = 0; group < num_groups(); ++group) {
      if (has_block(node, group)) {
        pool(node, group).set_retention(block(node, group), retention);
      }
    }
  }
}

void KvStore::touch(NodeId node) {
  tree_.move_to_front(node);
  for (int group = 0; group < num_groups(); ++group) {
    if (has_block(node, group) && pool(node, group).is_cached(block(node, group))) {
      pool(node, group).touch(block(node, group));
    }
  }
}

void KvStore::remove_if_empty(NodeId node) {
  const auto is_empty = [&](const PrefixNode& n) {
    return n.first_child == kNoNode && n.holders == 0 &&
           std::ranges::all_of(n.blocks, [](BlockId block) { return block == kNoBlock; });
  };
  while (node != kNoNode && is_empty(tree_[node])) {
    const NodeId parent = tree_[node].parent;
    tree_.remove(node);
    node = parent;
  }
}

void KvStore::clear() {
  for (const NodeId node : tree_.nodes()) {
    for (int group = 0; group < num_groups(); ++group) {
      if (has_block(node, group)) {
        detach(node, group);
      }
    }
  }
  tree_.clear();
}

}  // namespace aotllm
