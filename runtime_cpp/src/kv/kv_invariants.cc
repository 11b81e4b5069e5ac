// Self-checks of the KV cache: for tests, and for whoever hunts a fault.

#include <map>
#include <set>
#include <string>
#include <utility>

#include "aotllm/errors.h"
#include "kv/kv_cache_impl.h"

namespace aotllm {
namespace {

void require(bool holds, const std::string& rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, "KV cache: broken invariant: " + rule);
  }
}

std::string name(const char* what, std::int32_t id, int group) {
  return std::string(what) + " " + std::to_string(id) + " of group " + std::to_string(group) + " ";
}

}  // namespace

void KvStore::check_invariants() const {
  tree_.check_invariants();
  const std::vector<NodeId> nodes = tree_.nodes();
  for (int group = 0; group < num_groups(); ++group) {
    std::int32_t on_tier[2] = {0, 0};
    for (const NodeId node : nodes) {
      check_node(node, group);
      if (has_block(node, group)) {
        ++on_tier[tier(node, group) == KvTier::kDevice ? 0 : 1];
      }
    }
    for (const KvTier tier : {KvTier::kDevice, KvTier::kHost}) {
      const BlockPool& pool = (tier == KvTier::kDevice ? device_ : host_)[static_cast<std::size_t>(group)];
      pool.check_invariants();
      std::int32_t with_node = 0;
      for (BlockId block = 0; block < pool.num_blocks(); ++block) {
        with_node += pool.node(block) == kNoNode ? 0 : 1;
      }
      require(with_node == on_tier[tier == KvTier::kDevice ? 0 : 1], name("some block", -1, group) + "has a dead node");
      check_eviction_order(group, tier);
    }
    require(host(group).num_used() == 0, name("a host block", -1, group) + "is in use");
  }
}

void KvStore::check_node(NodeId node, int group) const {
  const PrefixNode& checked = tree_[node];
  if (tree_.is_root(node)) {
    require(!has_block(node, group), name("root", node, group) + "has a block");
    require(checked.first_child != kNoNode || checked.holders > 0, name("root", node, group) + "has no child");
    return;
  }
  require(checked.retention <= tree_[checked.parent].retention || tree_.is_root(checked.parent),
          name("node", node, group) + "has a higher retention than its parent");
  require(!is_full_attention(group) || has_block(node, group), name("node", node, group) + "has no block");
  if (!has_block(node, group)) {
    return;
  }
  require(pool(node, group).node(block(node, group)) == node, name("node", node, group) + "has another's block");
  if (is_full_attention(group) && !tree_.is_root(checked.parent) && on_device(node, group)) {
    require(on_device(checked.parent, group), name("node", node, group) + "is on the device, but its parent is not");
    const auto references = [&](NodeId n) { return device(group).references(block(n, group)); };
    require(references(node) <= references(checked.parent), name("node", node, group) + "is in use without its parent");
  }
}

void KvStore::check_eviction_order(int group, KvTier tier) const {
  if (!is_full_attention(group)) {
    return;
  }
  const BlockPool& pool = (tier == KvTier::kDevice ? device_ : host_)[static_cast<std::size_t>(group)];
  std::set<NodeId> before;
  for (const BlockId block : pool.cached()) {
    const NodeId node = pool.node(block);
    require(!before.contains(tree_[node].parent), name("block", block, group) + "is evicted after its parent's");
    before.insert(node);
  }
}

void KvCache::Impl::check_table(const BlockTable& table) const {
  for (int group = 0; group < store.num_groups(); ++group) {
    const BlockTable::Group& held = table.groups_[static_cast<std::size_t>(group)];
    for (std::size_t i = 0; i < held.entries.size(); ++i) {
      require((held.entries[i] == kNoBlock) == (i < static_cast<std::size_t>(held.first)),
              name("entry", static_cast<std::int32_t>(i), group) + "of a table is on the wrong side of its window");
    }
  }
  if (table.epoch_ != epoch) {
    return;
  }
  NodeId node = table.node_;
  for (std::int32_t i = table.num_committed_ - 1; i >= 0; --i) {
    require(node != kNoNode && store.tree().is_full(node), name("entry", i, 0) + "of a table is not in the tree");
    for (int group = 0; group < store.num_groups(); ++group) {
      const BlockId entry = table.groups_[static_cast<std::size_t>(group)].entries[static_cast<std::size_t>(i)];
      require(entry == kNoBlock || store.device(group).node(entry) == node,
              name("entry", i, group) + "of a table is not its node's block");
    }
    node = store.tree()[node].parent;
  }
}

void KvCache::check_invariants(std::span<const BlockTable* const> tables) const {
  const KvStore& store = impl_->store;
  store.check_invariants();
  std::map<NodeId, std::int32_t> holders;
  for (const BlockTable* table : tables) {
    impl_->check_table(*table);
    if (table->epoch_ == impl_->epoch && table->node_ != kNoNode) {
      ++holders[table->node_];
    }
  }
  for (const NodeId node : store.tree().nodes()) {
    require(store.tree()[node].holders == holders[node], name("node", node, 0) + "has a wrong number of holders");
  }
  for (int group = 0; group < store.num_groups(); ++group) {
    const BlockPool& pool = store.device(group);
    std::vector<std::int32_t> places(static_cast<std::size_t>(pool.num_blocks()), 0);
    for (const BlockTable* table : tables) {
      for (const BlockId block : table->blocks(group)) {
        if (block != kNoBlock) {
          ++places.at(static_cast<std::size_t>(block));
        }
      }
    }
    for (BlockId block = 0; block < pool.num_blocks(); ++block) {
      const std::int32_t found = places[static_cast<std::size_t>(block)];
      require(found == pool.references(block), name("block", block, group) + "stands in " + std::to_string(found) +
                                                   " tables, but counts " + std::to_string(pool.references(block)));
      require(found < 2 || pool.node(block) != kNoNode || impl_->epoch > 0,
              name("block", block, group) + "is shared, but not in the tree");
    }
    require(pool.num_unused() + pool.num_cached() + pool.num_used() == pool.num_blocks(),
            name("pool", -1, group) + "does not add up");
  }
}

}  // namespace aotllm
