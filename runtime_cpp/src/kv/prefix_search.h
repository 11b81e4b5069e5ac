#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/kv_cache.h"
#include "kv/kv_store.h"

namespace aotllm {

/// What the tree has of a sequence.
struct FoundPrefix {
  PrefixMatch match{};
  std::vector<NodeId> path{};  ///< the full nodes to take, first to last
  NodeId partial = kNoNode;    ///< child of the last of them, of whose blocks the first tokens are to be copied
};

/// The longest prefix of `tokens`, at most `limit` and all but one of them, whose blocks are cached in all groups as
/// far as the tokens behind it see them, and which can be had with the blocks that are available.
FoundPrefix find_prefix(const KvStore& store, const PrefixKeys& keys, std::span<const TokenId> tokens,
                        std::int32_t limit);

}  // namespace aotllm
