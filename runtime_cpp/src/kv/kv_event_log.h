#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "aotllm/kv_event.h"
#include "kv/prefix_tree.h"

namespace aotllm {

/// The last events that nobody has taken yet. An event that finds the log full pushes the oldest out; ids go on.
class KvEventLog {
 public:
  /// Keeps at most `max_events`; 0 = none are made.
  explicit KvEventLog(std::int32_t max_events) : max_events_(static_cast<std::size_t>(max_events)) {}

  /// Tells of the block of `group` of a full node, on the tier that the node names. Nothing is told of partial nodes.
  /// Where memory is short the event is dropped, and the gap in the ids tells.
  void add(KvEvent::Kind kind, const PrefixTree& tree, NodeId node, int group) noexcept;

  /// Events since the last call, oldest first.
  std::vector<KvEvent> take();

 private:
  std::size_t max_events_;
  std::uint64_t last_id_ = 0;
  std::deque<KvEvent> events_;
};

}  // namespace aotllm
