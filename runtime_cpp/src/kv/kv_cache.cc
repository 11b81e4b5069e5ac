#include "aotllm/kv_cache.h"

#include <algorithm>
#include <string>
#include <utility>

#include "aotllm/errors.h"
#include "kv/kv_cache_impl.h"

namespace aotllm {
namespace {

[[noreturn]] void misuse(const std::string& what) {
  throw Error(ErrorKind::kInternal, "KV cache: " + what);
}

std::int32_t size_of(std::span<const BlockId> entries) {
  return static_cast<std::int32_t>(entries.size());
}

void check_retention(std::int32_t retention) {
  if (retention < kMinRetention || retention > kMaxRetention) {
    misuse("retention " + std::to_string(retention) + "; it must be in [" + std::to_string(kMinRetention) + ", " +
           std::to_string(kMaxRetention) + "]");
  }
}

/// Grows the capacity by doubling, so that a sequence's table is moved a logarithm of its length times.
void reserve_entries(std::vector<BlockId>& entries, std::int32_t size) {
  const auto needed = static_cast<std::size_t>(size);
  if (needed > entries.capacity()) {
    entries.reserve(std::max(needed, 2 * entries.capacity()));
  }
}

}  // namespace

BlockCounts BlockTable::num_blocks() const {
  BlockCounts counts{};
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    counts[g] = size_of(groups_[g].entries) - groups_[g].first;
  }
  return counts;
}

bool BlockTable::empty() const {
  return node_ == kNoNode && std::ranges::all_of(groups_, [](const Group& group) { return group.entries.empty(); });
}

void BlockTable::swap(BlockTable& other) noexcept {
  std::swap(groups_, other.groups_);
  std::swap(num_committed_, other.num_committed_);
  std::swap(node_, other.node_);
  std::swap(epoch_, other.epoch_);
}

BlockRange blocks_in_step(std::int32_t num_computed, std::int32_t num_tokens, std::int32_t window,
                          std::int32_t tokens_per_block) {
  const std::int32_t first_seen = window == 0 ? 0 : std::max(0, num_computed - window + 1);
  const std::int32_t end = num_tokens / tokens_per_block + (num_tokens % tokens_per_block != 0 ? 1 : 0);
  return {first_seen == 0 ? 0 : first_seen / tokens_per_block, end};
}

// ---- taking blocks

PrefixMatch KvCache::match(const PrefixKeys& keys, std::span<const TokenId> tokens) const {
  return find_prefix(impl_->store, keys, tokens, INT32_MAX).match;
}

std::int32_t KvCache::acquire(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> tokens,
                              std::int32_t retention, std::int32_t limit) {
  if (!table.empty()) {
    misuse("acquire on a block table that holds blocks");
  }
  check_retention(retention);
  KvStore& store = impl_->store;
  const FoundPrefix found = find_prefix(store, keys, tokens, limit);
  impl_->fill(table, found);
  for (const NodeId node : found.path) {
    store.tree().move_to_front(node);
  }
  if (!found.path.empty()) {
    store.raise_retention(found.path.back(), retention);
  }
  store.stats().queried_tokens += static_cast<std::int64_t>(tokens.size());
  store.stats().hit_tokens += found.match.num_tokens;
  return found.match.num_tokens;
}

/// Refers to all that is taken first: what makes room for the rest is none of it.
void KvCache::Impl::fill(BlockTable& table, const FoundPrefix& found) {
  std::size_t total = 0;
  for (int group = 0; group < store.num_groups(); ++group) {
    const std::int32_t size = range(group, found.match.num_tokens, found.match.num_tokens).end;
    reserve_entries(table.groups_[static_cast<std::size_t>(group)].entries, size);
    total += static_cast<std::size_t>(size);
  }
  store.reserve_copies(total);

  const auto for_each_taken = [&](auto&& act) {
    for (int group = 0; group < store.num_groups(); ++group) {
      for (std::size_t i = static_cast<std::size_t>(range(group, found.match.num_tokens, found.match.num_tokens).begin);
           i < found.path.size(); ++i) {
        act(found.path[i], group);
      }
    }
  };
  const auto for_each_group_of_partial = [&](auto&& act) {
    for (int group = 0; group < store.num_groups() && found.partial != kNoNode; ++group) {
      act(found.partial, group);
    }
  };
  const auto pin = [&](NodeId node, int group) { store.pin(node, group); };
  for_each_taken(pin);
  for_each_group_of_partial(pin);
  for (int group = 0; group < store.num_groups(); ++group) {
    fill_group(table.groups_[static_cast<std::size_t>(group)], found, group);
  }
  for_each_group_of_partial([&](NodeId node, int group) { store.unpin(node, group); });
  if (found.partial != kNoNode) {
    store.tree().move_to_front(found.partial);
  }
  table.epoch_ = epoch;
  table.num_committed_ = static_cast<std::int32_t>(found.path.size());
  if (!found.path.empty()) {
    move_to(table, found.path.back());
  }
}

void KvCache::Impl::fill_group(BlockTable::Group& table, const FoundPrefix& found, int group) {
  table.first = range(group, found.match.num_tokens, found.match.num_tokens).begin;
  table.entries.assign(static_cast<std::size_t>(table.first), kNoBlock);
  for (std::size_t i = table.entries.size(); i < found.path.size(); ++i) {
    const NodeId node = found.path[i];
    table.entries.push_back(store.on_device(node, group) ? store.block(node, group) : store.onload(node, group));
    ++store.stats().reused_blocks;
  }
  if (found.partial != kNoNode) {
    table.entries.push_back(store.take(group));
    store.copy_to(found.partial, group, table.entries.back());
    ++store.stats().copied_blocks;
  }
}

bool KvCache::Impl::covers(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const {
  for (int group = 0; group < store.num_groups(); ++group) {
    const BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    const BlockRange needed = range(group, num_computed, num_tokens);
    if (held.first != needed.begin || size_of(held.entries) < needed.end) {
      return false;
    }
  }
  return true;
}

void KvCache::Impl::check_step(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const {
  if (num_computed < 0 || num_tokens < num_computed) {
    misuse("a step from " + std::to_string(num_computed) + " to " + std::to_string(num_tokens) + " tokens");
  }
  for (int group = 0; group < store.num_groups(); ++group) {
    const BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    if (range(group, num_computed, num_tokens).begin < held.first) {
      misuse("a step from " + std::to_string(num_computed) + " tokens, but what it sees has left the window already");
    }
    if (range(group, num_computed, num_computed).end > size_of(held.entries)) {
      misuse(std::to_string(num_computed) + " tokens are computed, but the table has " +
             std::to_string(held.entries.size()) + " blocks");
    }
  }
}

int KvCache::Impl::short_group(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const {
  for (int group = 0; group < store.num_groups(); ++group) {
    const BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    const BlockRange needed = range(group, num_computed, num_tokens);
    std::int32_t available = store.device(group).num_available();
    for (std::int32_t i = held.first; i < std::min(needed.begin, size_of(held.entries)); ++i) {
      available += store.device(group).references(held.entries[static_cast<std::size_t>(i)]) == 1 ? 1 : 0;
    }
    if (needed.end - size_of(held.entries) > available) {
      return group;
    }
  }
  return -1;
}

BlockCounts KvCache::num_shared(const BlockTable& table) const {
  BlockCounts shared{};
  for (int group = 0; group < num_groups(); ++group) {
    for (const BlockId block : table.blocks(group)) {
      if (block != kNoBlock && impl_->store.device(group).references(block) > 1) {
        ++shared[static_cast<std::size_t>(group)];
      }
    }
  }
  return shared;
}

bool KvCache::can_grow(const BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) const {
  if (impl_->covers(table, num_computed, num_tokens)) {
    return true;
  }
  impl_->check_step(table, num_computed, num_tokens);
  return impl_->short_group(table, num_computed, num_tokens) < 0;
}

void KvCache::grow(BlockTable& table, std::int32_t num_computed, std::int32_t num_tokens) {
  if (impl_->covers(table, num_computed, num_tokens)) {
    return;
  }
  impl_->check_step(table, num_computed, num_tokens);
  if (const int group = impl_->short_group(table, num_computed, num_tokens); group >= 0) {
    misuse(std::to_string(num_tokens) + " tokens need " +
           std::to_string(impl_->range(group, num_computed, num_tokens).size()) + " blocks of group " +
           std::to_string(group) + "; the table has " +
           std::to_string(table.num_blocks()[static_cast<std::size_t>(group)]) + ", and " +
           std::to_string(num_free(group)) + " are free");
  }
  KvStore& store = impl_->store;
  std::size_t total = 0;
  for (int group = 0; group < store.num_groups(); ++group) {
    BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    const std::int32_t end = impl_->range(group, num_computed, num_tokens).end;
    reserve_entries(held.entries, end);
    total += static_cast<std::size_t>(std::max(0, end - size_of(held.entries)));
  }
  store.reserve_copies(total);
  if (table.empty()) {
    table.epoch_ = impl_->epoch;
  }
  for (int group = 0; group < store.num_groups(); ++group) {
    BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    const BlockRange needed = impl_->range(group, num_computed, num_tokens);
    impl_->drop_before(held, group, needed.begin);
    while (size_of(held.entries) < needed.end) {
      held.entries.push_back(store.take(group));
    }
  }
}

/// `begin` is at most the number of entries: computed tokens lie in them.
void KvCache::Impl::drop_before(BlockTable::Group& table, int group, std::int32_t begin) {
  for (; table.first < begin; ++table.first) {
    store.device(group).release(std::exchange(table.entries[static_cast<std::size_t>(table.first)], kNoBlock));
  }
}

// ---- putting blocks into the tree, and giving them back

void KvCache::commit(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
                     std::int32_t retention) {
  const std::int64_t next = static_cast<std::int64_t>(table.num_committed_ + 1) * tokens_per_block();
  if (static_cast<std::int64_t>(computed.size()) >= next) {
    impl_->check_computed(table, keys, computed, retention);
    impl_->commit(table, keys, computed, retention);
  }
}

void KvCache::Impl::check_computed(const BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
                                   std::int32_t retention) const {
  check_retention(retention);
  const auto block_size = static_cast<std::size_t>(store.config().tokens_per_block);
  if (keys.blocks().size() < computed.size() / block_size) {
    misuse(std::to_string(keys.blocks().size()) + " keys for " + std::to_string(computed.size()) + " tokens");
  }
  for (int group = 0; group < store.num_groups(); ++group) {
    const std::size_t blocks = table.groups_[static_cast<std::size_t>(group)].entries.size();
    if (computed.size() > blocks * block_size) {
      misuse(std::to_string(computed.size()) + " tokens are computed, but the table has " + std::to_string(blocks) +
             " blocks");
    }
  }
}

void KvCache::Impl::commit(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
                           std::int32_t retention) {
  const auto block_size = static_cast<std::size_t>(store.config().tokens_per_block);
  const auto num_full = static_cast<std::int32_t>(computed.size() / block_size);
  if (table.epoch_ != epoch || num_full <= table.num_committed_) {
    return;
  }
  PrefixTree& tree = store.tree();
  tree.reserve(static_cast<std::size_t>(num_full - table.num_committed_) + 1);
  NodeId node = table.node_ == kNoNode ? tree.root_or_new(keys.realm()) : table.node_;
  for (std::int32_t i = table.num_committed_; i < num_full; ++i) {
    const std::uint64_t key = keys.blocks()[static_cast<std::size_t>(i)];
    const std::span<const TokenId> block = computed.subspan(static_cast<std::size_t>(i) * block_size, block_size);
    const NodeId parent = node;
    node = tree.find(parent, key, block);
    if (node == kNoNode) {
      node = store.add(parent, key, block);
    }
    store_block(table, node, i, retention);
    move_to(table, node);
    table.num_committed_ = i + 1;
  }
}

/// The node takes the table's blocks where it has none on the device; the table takes the node's where it has.
void KvCache::Impl::store_block(BlockTable& table, NodeId node, std::int32_t index, std::int32_t retention) {
  store.raise_retention(node, retention);
  for (int group = 0; group < store.num_groups(); ++group) {
    BlockId& entry = table.groups_[static_cast<std::size_t>(group)].entries[static_cast<std::size_t>(index)];
    if (entry == kNoBlock) {
      continue;
    }
    if (store.on_device(node, group)) {
      store.pin(node, group);
      store.device(group).release(std::exchange(entry, store.block(node, group)));
    } else {
      store.attach(node, group, entry);
    }
  }
  store.tree().move_to_front(node);
}

void KvCache::Impl::move_to(BlockTable& table, NodeId node) {
  PrefixTree& tree = store.tree();
  if (node != kNoNode) {
    ++tree[node].holders;
  }
  const NodeId left = std::exchange(table.node_, node);
  if (left != kNoNode) {
    --tree[left].holders;
    store.remove_if_empty(left);
  }
}

void KvCache::release(BlockTable& table, const PrefixKeys& keys, std::span<const TokenId> computed,
                      std::int32_t retention) {
  impl_->check_computed(table, keys, computed, retention);
  impl_->commit(table, keys, computed, retention);
  impl_->store_tail(table, keys.realm(), computed, retention);
  impl_->give_back(table);
}

void KvCache::Impl::store_tail(BlockTable& table, const PrefixRealm& realm, std::span<const TokenId> computed,
                               std::int32_t retention) {
  const std::size_t begin =
      static_cast<std::size_t>(table.num_committed_) * static_cast<std::size_t>(store.config().tokens_per_block);
  if (table.epoch_ != epoch || computed.size() <= begin) {
    return;
  }
  PrefixTree& tree = store.tree();
  tree.reserve(2);
  const NodeId parent = table.node_ == kNoNode ? tree.root_or_new(realm) : table.node_;
  const std::span<const TokenId> tail = computed.subspan(begin);
  NodeId node = store.find_beginning(parent, tail);
  if (node == kNoNode) {
    node = store.add(parent, 0, tail);
  }
  if (tree.tokens(node).size() == tail.size()) {
    store_block(table, node, table.num_committed_, retention);
  } else {
    store.touch(node);
  }
}

/// Last to first, for the block that was used longest ago goes first, and leaves are to go before their parents.
void KvCache::Impl::give_back(BlockTable& table) {
  for (int group = 0; group < store.num_groups(); ++group) {
    BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    while (size_of(held.entries) > held.first) {
      store.device(group).release(held.entries.back());
      held.entries.pop_back();
    }
    held.entries.clear();
    held.first = 0;
  }
  if (table.epoch_ == epoch) {
    move_to(table, kNoNode);
  }
  table.node_ = kNoNode;
  table.num_committed_ = 0;
}

void KvCache::discard(BlockTable& table) {
  impl_->give_back(table);
}

void KvCache::clear() {
  impl_->store.clear();
  ++impl_->epoch;
}

// ---- the rest

KvCache::KvCache(const KvCacheConfig& config) : impl_(std::make_unique<Impl>(config)) {}
KvCache::~KvCache() = default;

std::vector<BlockCopy> KvCache::take_copies() {
  return impl_->store.take_copies();
}
std::vector<KvEvent> KvCache::take_events() {
  return impl_->store.events().take();
}
std::int32_t KvCache::num_free(int group) const {
  return impl_->store.device(group).num_available();
}
std::int32_t KvCache::num_cached(int group) const {
  return impl_->store.device(group).num_cached();
}
std::int32_t KvCache::num_used(int group) const {
  return impl_->store.device(group).num_used();
}
std::int32_t KvCache::num_blocks(int group) const {
  return impl_->store.device(group).num_blocks();
}
std::int32_t KvCache::num_host_used(int group) const {
  return impl_->store.host(group).num_blocks() - impl_->store.host(group).num_unused();
}
int KvCache::num_groups() const {
  return impl_->store.num_groups();
}
std::int32_t KvCache::tokens_per_block() const {
  return impl_->store.config().tokens_per_block;
}
const KvCacheStats& KvCache::stats() const {
  return impl_->store.stats();
}

}  // namespace aotllm
