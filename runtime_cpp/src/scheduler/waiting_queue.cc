#include "aotllm/waiting_queue.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

/// Entries whose cached tokens are asked for anew in a step, beside the first one: a look-up costs microseconds.
constexpr std::size_t kRefreshedPerStep = 3;

enum class Section : std::uint8_t { kOverdue, kPreempted, kNew };

/// Orders the queue. `merit` is larger for who goes first: priority or cached tokens.
struct Place {
  Section section = Section::kNew;
  std::int32_t merit = 0;
  SequenceId id = 0;

  friend bool operator<(const Place& a, const Place& b) {
    return std::tuple(a.section, b.merit, a.id) < std::tuple(b.section, a.merit, b.id);
  }
  friend bool operator==(const Place&, const Place&) = default;
};

void require(bool holds, const std::string& rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, "the waiting queue breaks the rule: " + rule);
  }
}

}  // namespace

class WaitingQueue::Impl {
 public:
  Impl(QueuePolicy policy, std::int64_t max_wait_steps, CachedTokens cached_tokens)
      : policy_(policy), max_wait_steps_(max_wait_steps), cached_tokens_(std::move(cached_tokens)) {
    require(max_wait_steps >= 1, "max_wait_steps ≥ 1");
    require(policy != QueuePolicy::kLongestPrefix || cached_tokens_, "longest_prefix knows cached tokens");
  }

  void insert(const Entry& entry) {
    require(!contains(entry.id), "a sequence waits once, but " + std::to_string(entry.id) + " came again");
    const Place place = place_of(entry);
    waiting_.emplace(entry.id, Waiting{entry, place});
    order_.insert(place);
    if (!entry.overdue) {
      by_age_.emplace(entry.arrival_step, entry.id);
    }
  }

  void erase(SequenceId id) {
    const auto found = waiting_.find(id);
    if (found == waiting_.end()) {
      return;
    }
    order_.erase(found->second.place);
    by_age_.erase({found->second.entry.arrival_step, id});
    waiting_.erase(found);
  }

  bool contains(SequenceId id) const { return waiting_.contains(id); }
  std::size_t size() const { return waiting_.size(); }

  std::vector<SequenceId> advance(std::int64_t now) {
    std::vector<SequenceId> became_overdue;
    while (!by_age_.empty() && by_age_.begin()->first <= now - max_wait_steps_) {
      const SequenceId id = by_age_.begin()->second;
      by_age_.erase(by_age_.begin());
      Waiting& waiting = waiting_.at(id);
      waiting.entry.overdue = true;
      move(waiting);
      became_overdue.push_back(id);
    }
    if (policy_ == QueuePolicy::kLongestPrefix && !order_.empty()) {
      refresh();
    }
    return became_overdue;
  }

  std::vector<SequenceId> front(std::size_t count) const {
    std::vector<SequenceId> ids;
    ids.reserve(std::min(count, order_.size()));
    for (auto it = order_.begin(); it != order_.end() && ids.size() < count; ++it) {
      ids.push_back(it->id);
    }
    return ids;
  }

  void check_invariants() const {
    require(order_.size() == waiting_.size(), "every entry has one place");
    std::size_t not_overdue = 0;
    for (const auto& [id, waiting] : waiting_) {
      const Entry& entry = waiting.entry;
      require(id == entry.id && id == waiting.place.id, "entries are filed under their ids");
      require(order_.contains(waiting.place), "every entry has one place");
      require(waiting.place.section == section_of(entry), "overdue, then preempted, then new ones");
      require(by_age_.contains({entry.arrival_step, id}) == !entry.overdue, "who is not overdue may become so");
      not_overdue += entry.overdue ? 0 : 1;
    }
    require(by_age_.size() == not_overdue, "who is not overdue may become so");
  }

 private:
  struct Waiting {
    Entry entry;
    Place place;
  };

  static Section section_of(const Entry& entry) {
    return entry.overdue ? Section::kOverdue : entry.preempted ? Section::kPreempted : Section::kNew;
  }

  Place place_of(const Entry& entry) const {
    const Section section = section_of(entry);
    std::int32_t merit = 0;
    if (section == Section::kPreempted || (section == Section::kNew && policy_ == QueuePolicy::kPriority)) {
      merit = entry.priority;
    } else if (section == Section::kNew && policy_ == QueuePolicy::kLongestPrefix) {
      merit = cached_tokens_(entry.id);
    }
    return {section, merit, entry.id};
  }

  void move(Waiting& waiting) {
    const Place place = place_of(waiting.entry);
    if (place != waiting.place) {
      order_.erase(waiting.place);
      order_.insert(place);
      waiting.place = place;
    }
  }

  /// Every entry has its turn, by id in a circle. The first one has it always, since it is what is admitted next.
  void refresh() {
    move(waiting_.at(order_.begin()->id));
    for (std::size_t i = 0; i < std::min(kRefreshedPerStep, waiting_.size()); ++i) {
      auto next = waiting_.upper_bound(last_refreshed_);
      next = next == waiting_.end() ? waiting_.begin() : next;
      last_refreshed_ = next->first;
      move(next->second);
    }
  }

  QueuePolicy policy_;
  std::int64_t max_wait_steps_;
  CachedTokens cached_tokens_;
  std::map<SequenceId, Waiting> waiting_;
  std::set<Place> order_;
  std::set<std::pair<std::int64_t, SequenceId>> by_age_;  ///< (arrival step, id) of who is not overdue
  SequenceId last_refreshed_ = 0;
};

WaitingQueue::WaitingQueue(QueuePolicy policy, std::int64_t max_wait_steps, CachedTokens cached_tokens)
    : impl_(std::make_unique<Impl>(policy, max_wait_steps, std::move(cached_tokens))) {}

WaitingQueue::~WaitingQueue() = default;

void WaitingQueue::insert(const Entry& entry) {
  impl_->insert(entry);
}

void WaitingQueue::erase(SequenceId id) {
  impl_->erase(id);
}

bool WaitingQueue::contains(SequenceId id) const {
  return impl_->contains(id);
}

std::size_t WaitingQueue::size() const {
  return impl_->size();
}

std::vector<SequenceId> WaitingQueue::advance(std::int64_t now) {
  return impl_->advance(now);
}

std::vector<SequenceId> WaitingQueue::front(std::size_t count) const {
  return impl_->front(count);
}

void WaitingQueue::check_invariants() const {
  impl_->check_invariants();
}

}  // namespace aotllm
