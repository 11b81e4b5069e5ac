#include "kv/kv_event_log.h"

#include <iterator>
#include <new>
#include <utility>

namespace aotllm {
namespace {

KvEvent make_event(KvEvent::Kind kind, const PrefixTree& tree, NodeId node, int group) {
  const PrefixNode& told = tree[node];
  KvEvent event;
  event.kind = kind;
  event.key = told.key;
  event.parent_key = tree.is_root(told.parent) ? 0 : tree[told.parent].key;
  event.group = group;
  event.tier = (told.on_host >> group & 1) == 0 ? KvTier::kDevice : KvTier::kHost;
  if (kind == KvEvent::Kind::kStored) {
    event.realm = *told.realm;
    event.tokens.assign(tree.tokens(node).begin(), tree.tokens(node).end());
  }
  return event;
}

}  // namespace

const char* kv_event_kind_name(KvEvent::Kind kind) noexcept {
  switch (kind) {
    case KvEvent::Kind::kStored:
      return "stored";
    case KvEvent::Kind::kRemoved:
      return "removed";
    case KvEvent::Kind::kMoved:
      return "moved";
  }
  return "stored";
}

void KvEventLog::add(KvEvent::Kind kind, const PrefixTree& tree, NodeId node, int group) noexcept {
  if (max_events_ == 0 || !tree.is_full(node)) {
    return;
  }
  ++last_id_;
  if (events_.size() == max_events_) {
    events_.pop_front();
  }
  try {
    events_.push_back(make_event(kind, tree, node, group));
    events_.back().id = last_id_;
  } catch (const std::bad_alloc&) {  // dropped
  }
}

std::vector<KvEvent> KvEventLog::take() {
  std::vector<KvEvent> taken(std::make_move_iterator(events_.begin()), std::make_move_iterator(events_.end()));
  events_.clear();
  return taken;
}

}  // namespace aotllm
