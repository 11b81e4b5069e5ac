#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "manager/sequence.h"

namespace aotllm {

/// The slots in which a runner counts tokens; each belongs to one sequence at a time.
class CountSlots {
 public:
  explicit CountSlots(std::int32_t size) : owners_(static_cast<std::size_t>(size), nullptr) {
    for (std::int32_t slot = size; slot > 0; --slot) {
      free_.push_back(slot - 1);
    }
  }

  /// Gives `sequence` a slot unless it has one. False where none is left.
  bool hold(Sequence& sequence) {
    if (sequence.count_slot < 0 && !free_.empty()) {
      sequence.count_slot = free_.back();
      sequence.num_counted = 0;
      owners_[static_cast<std::size_t>(sequence.count_slot)] = &sequence;
      free_.pop_back();
    }
    return sequence.count_slot >= 0;
  }

  /// Takes the slot of `sequence` back, if it has one.
  void release(Sequence& sequence) {
    if (sequence.count_slot >= 0) {
      owners_[static_cast<std::size_t>(sequence.count_slot)] = nullptr;
      free_.push_back(sequence.count_slot);
      sequence.count_slot = -1;
    }
  }

  bool belongs_to(std::int32_t slot, const Sequence& sequence) const {
    return owners_.at(static_cast<std::size_t>(slot)) == &sequence;
  }
  std::int32_t num_held() const { return static_cast<std::int32_t>(owners_.size() - free_.size()); }

 private:
  std::vector<std::int32_t> free_;  ///< the one to be given next is the last
  std::vector<const Sequence*> owners_;
};

}  // namespace aotllm
