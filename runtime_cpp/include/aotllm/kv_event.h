#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/model_runner.h"
#include "aotllm/prefix_key.h"

namespace aotllm {

/// News of the prefix tree, for routers that send a request to where its prefix is.
struct KvEvent {
  enum class Kind : std::uint8_t {
    kStored,   ///< a full block can be reused from now on
    kRemoved,  ///< it no longer can
    kMoved,    ///< it went to the other tier
  };

  Kind kind = Kind::kStored;
  std::uint64_t id = 0;          ///< numbers events from 1; a gap tells that events were dropped
  std::uint64_t key = 0;         ///< the block's, as PrefixKeys makes it
  std::uint64_t parent_key = 0;  ///< of the block before it; 0 for the first
  std::int32_t group = 0;
  KvTier tier = KvTier::kDevice;  ///< where it is now (was, for kRemoved)
  PrefixRealm realm;              ///< kStored only
  std::vector<TokenId> tokens;    ///< kStored only: [tokens_per_block]
};

/// "stored", "removed" or "moved".
const char* kv_event_kind_name(KvEvent::Kind kind) noexcept;

}  // namespace aotllm
