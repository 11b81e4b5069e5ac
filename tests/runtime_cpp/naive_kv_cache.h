#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "aotllm/kv_cache.h"

namespace aotllm::testing {

/// What KvCache promises, written down without regard to speed: prefixes are whole token vectors, every search looks at
/// everything. Knows how many blocks there are, but not which.
class NaiveKvCache {
 public:
  using Tokens = std::vector<TokenId>;
  using Name = std::pair<int, Tokens>;  ///< a realm, and all tokens up to the end of a block

  struct Slot {
    KvTier tier = KvTier::kDevice;
    int users = 0;
    std::int64_t used = 0;  ///< when it was last
  };
  struct Entry {
    std::int32_t retention = 0;
    std::int64_t recency = 0;  ///< among siblings
    std::array<std::optional<Slot>, kMaxKvGroups> slots;
  };
  struct Place {
    enum { kGone, kOwn, kShared } kind = kGone;
    Name name{};  ///< of the entry if shared
  };
  struct Table {
    std::array<std::vector<Place>, kMaxKvGroups> groups;
    int realm = 0;
    std::int32_t num_committed = 0;
    std::optional<Name> last;  ///< the last committed entry
    int epoch = 0;
  };

  explicit NaiveKvCache(KvCacheConfig config) : config_(std::move(config)) {}

  std::int32_t acquire(Table& table, int realm, const Tokens& tokens, std::int32_t retention, std::int32_t limit) {
    table = Table{};
    table.realm = realm;
    table.epoch = epoch_;
    for (std::int32_t m = std::min(limit, size(tokens) - 1); m > 0; --m) {
      if (const std::optional<Name> partial = find(realm, tokens, m)) {
        take_prefix(table, tokens, m, *partial);
        if (table.last) {
          raise(*table.last, retention);
        }
        tidy(table);
        return m;
      }
    }
    tidy(table);
    return 0;
  }

  bool can_grow(const Table& table, std::int32_t num_computed, std::int32_t num_tokens) const {
    for (int g = 0; g < num_groups(); ++g) {
      const std::vector<Place>& places = table.groups[g];
      const BlockRange needed = range(g, num_computed, num_tokens);
      std::int32_t available = num_free(g);
      for (std::int32_t i = 0; i < std::min(needed.begin, size(places)); ++i) {
        const Place& place = places[i];
        available += num_users(place, g) == 1;
      }
      if (needed.end - size(places) > available) {
        return false;
      }
    }
    return true;
  }

  void grow(Table& table, std::int32_t num_computed, std::int32_t num_tokens) {
    if (!table.last && std::ranges::all_of(table.groups, [](const auto& places) { return places.empty(); })) {
      table.epoch = epoch_;  // nothing in it is from before a clear
    }
    for (int g = 0; g < num_groups(); ++g) {
      std::vector<Place>& places = table.groups[g];
      const BlockRange needed = range(g, num_computed, num_tokens);
      for (std::int32_t i = 0; i < std::min(needed.begin, size(places)); ++i) {
        give_back(places[i], g);
      }
      while (size(places) < needed.end) {
        take(g);
        places.push_back({Place::kOwn});
        ++own_[g];
      }
    }
    tidy(table);
  }

  void commit(Table& table, const Tokens& computed, std::int32_t retention) {
    if (table.epoch != epoch_) {
      return;
    }
    for (std::int32_t i = table.num_committed; i < size(computed) / block(); ++i) {
      const Name name = prefix(table.realm, computed, (i + 1) * block());
      if (!entries_.contains(name)) {
        add(name);
      }
      store(table, name, i, retention);
      table.last = name;
      table.num_committed = i + 1;
    }
    tidy(table);
  }

  void release(Table& table, const Tokens& computed, std::int32_t retention) {
    commit(table, computed, retention);
    if (table.epoch == epoch_ && size(computed) > table.num_committed * block()) {
      const Name tail{table.realm, computed};
      std::optional<Name> covering;
      for (const auto& [name, entry] : entries_) {
        if (parent(name) == parent(tail) && begins_with(name, tail) &&
            (!covering || entry.recency > entries_[*covering].recency)) {
          covering = name;
        }
      }
      if (!covering) {
        add(tail);
        covering = tail;
      }
      if (*covering == tail) {
        store(table, tail, table.num_committed, retention);
      } else {
        entries_[*covering].recency = ++now_;
        for (std::optional<Slot>& slot : entries_[*covering].slots) {
          if (slot && slot->users == 0) {
            slot->used = ++now_;
          }
        }
      }
    }
    discard(table);
  }

  void discard(Table& table) {
    for (int g = 0; g < num_groups(); ++g) {
      for (auto place = table.groups[g].rbegin(); place != table.groups[g].rend(); ++place) {
        give_back(*place, g);
      }
      table.groups[g].clear();
    }
    table.last.reset();
    table.num_committed = 0;
    tidy(table);
  }

  void clear(std::span<Table* const> tables) {
    ++epoch_;
    const auto renamed = [&](const Name& name) { return Name{-100 * epoch_ - name.first, name.second}; };
    for (int g = 0; g < num_groups(); ++g) {
      for (const auto& [name, entry] : entries_) {
        if (entry.slots[g] && entry.slots[g]->users > 0) {
          orphans_[g][renamed(name)] = entry.slots[g]->users;
        }
      }
      for (Table* table : tables) {
        for (Place& place : table->groups[g]) {
          if (place.kind == Place::kShared && !is_orphan(place)) {
            place.name = renamed(place.name);
          }
        }
      }
    }
    entries_.clear();
    last_.clear();
  }

  std::int32_t num_used(int g) const {
    std::int32_t used = own_[g] + size(orphans_[g]);
    for (const auto& [name, entry] : entries_) {
      used += entry.slots[g] && entry.slots[g]->users > 0;
    }
    return used;
  }
  std::int32_t num_cached(int g, KvTier tier = KvTier::kDevice) const {
    std::int32_t cached = 0;
    for (const auto& [name, entry] : entries_) {
      cached += entry.slots[g] && entry.slots[g]->tier == tier && (tier == KvTier::kHost || entry.slots[g]->users == 0);
    }
    return cached;
  }
  std::int32_t num_free(int g) const { return config_.groups[g].num_blocks - num_used(g); }
  int num_groups() const { return static_cast<int>(config_.groups.size()); }
  const std::map<Name, Entry>& entries() const { return entries_; }
  std::int32_t block() const { return config_.tokens_per_block; }

 private:
  template <class Container>
  static std::int32_t size(const Container& container) {
    return static_cast<std::int32_t>(container.size());
  }
  static Name prefix(int realm, const Tokens& tokens, std::int32_t length) {
    return {realm, {tokens.begin(), tokens.begin() + length}};
  }
  static bool begins_with(const Name& name, const Name& beginning) {
    return name.first == beginning.first && name.second.size() >= beginning.second.size() &&
           std::equal(beginning.second.begin(), beginning.second.end(), name.second.begin());
  }
  Name parent(const Name& name) const {
    return prefix(name.first, name.second, (size(name.second) - 1) / block() * block());
  }
  bool is_full_attention(int g) const { return config_.groups[g].window == 0; }
  BlockRange range(int g, std::int32_t num_computed, std::int32_t num_tokens) const {
    const std::int32_t window = config_.groups[g].window;
    std::int32_t first = num_computed;
    while (first > 0 && (window == 0 || num_computed - (first - 1) < window)) {
      --first;  // the first token that num_computed sees, itself included
    }
    std::int32_t end = 0;
    while (end * block() < num_tokens) {
      ++end;
    }
    return {first / block(), end};
  }

  /// The entry of which a part is to be copied for a match of m tokens; an empty name if m ends with a block; nothing
  /// if m tokens are not to be had.
  std::optional<Name> find(int realm, const Tokens& tokens, std::int32_t m) const {
    const std::int32_t depth = m / block();
    for (std::int32_t i = 0; i < depth; ++i) {
      const auto found = entries_.find(prefix(realm, tokens, (i + 1) * block()));
      if (found == entries_.end()) {
        return std::nullopt;
      }
      for (int g = 0; g < num_groups(); ++g) {
        if (i >= range(g, m, m).begin && !found->second.slots[g]) {
          return std::nullopt;
        }
      }
    }
    if (m % block() == 0) {
      return affordable(realm, tokens, m, nullptr) ? std::optional<Name>(Name{}) : std::nullopt;
    }
    std::optional<Name> best;
    const Name wanted = prefix(realm, tokens, m);
    for (const auto& [name, entry] : entries_) {
      const bool complete = std::all_of(entry.slots.begin(), entry.slots.begin() + num_groups(),
                                        [](const std::optional<Slot>& slot) { return slot.has_value(); });
      if (!complete || parent(name) != parent(wanted) || !begins_with(name, wanted) ||
          !affordable(realm, tokens, m, &entry)) {
        continue;
      }
      if (size(name.second) % block() == 0 && begins_with({realm, tokens}, name)) {
        return name;  // the very block goes before others that begin alike
      }
      if (!best || entry.recency > entries_.at(*best).recency) {
        best = name;
      }
    }
    return best;
  }

  bool affordable(int realm, const Tokens& tokens, std::int32_t m, const Entry* partial) const {
    for (int g = 0; g < num_groups(); ++g) {
      std::int32_t cost = 0;
      for (std::int32_t i = range(g, m, m).begin; i < m / block(); ++i) {
        cost += entries_.at(prefix(realm, tokens, (i + 1) * block())).slots[g]->users == 0;
      }
      if (partial != nullptr) {
        cost += 1 + (partial->slots[g]->tier == KvTier::kDevice && partial->slots[g]->users == 0);
      }
      if (cost > num_free(g)) {
        return false;
      }
    }
    return true;
  }

  void take_prefix(Table& table, const Tokens& tokens, std::int32_t m, const Name& partial) {
    const bool copies = !partial.second.empty();
    for (int g = 0; g < num_groups(); ++g) {
      for (std::int32_t i = 0; i < m / block(); ++i) {
        const Name name = prefix(table.realm, tokens, (i + 1) * block());
        const bool taken = i >= range(g, m, m).begin;
        table.groups[g].push_back(taken ? Place{Place::kShared, name} : Place{});
        if (taken) {
          ++entries_[name].slots[g]->users;
        }
      }
      if (copies) {
        ++entries_[partial].slots[g]->users;
      }
    }
    for (int g = 0; g < num_groups(); ++g) {
      for (const Place& place : table.groups[g]) {
        if (place.kind == Place::kShared && entries_[place.name].slots[g]->tier == KvTier::kHost) {
          take(g);
          entries_[place.name].slots[g]->tier = KvTier::kDevice;
        }
      }
      if (copies) {
        take(g);
        table.groups[g].push_back({Place::kOwn});
        ++own_[g];
      }
    }
    for (std::int32_t i = 0; i < m / block(); ++i) {
      table.last = prefix(table.realm, tokens, (i + 1) * block());
      entries_[*table.last].recency = ++now_;
    }
    table.num_committed = m / block();
    for (int g = 0; copies && g < num_groups(); ++g) {
      Slot& source = *entries_[partial].slots[g];
      if (--source.users == 0) {
        source.used = ++now_;
      }
      entries_[partial].recency = ++now_;
    }
  }

  /// Makes sure that there is a free device block.
  void take(int g) {
    if (num_used_or_pinned(g) + num_cached(g) < config_.groups[g].num_blocks) {
      return;
    }
    const Name victim = *oldest(g, KvTier::kDevice);
    if (num_cached(g, KvTier::kHost) >= config_.groups[g].num_host_blocks) {
      if (const std::optional<Name> host_victim = oldest(g, KvTier::kHost)) {
        lose(*host_victim, g);
      }
    }
    if (num_cached(g, KvTier::kHost) < config_.groups[g].num_host_blocks) {
      entries_[victim].slots[g] = Slot{KvTier::kHost, 0, ++now_};
    } else {
      lose(victim, g);
    }
  }

  /// As num_used, without blocks on the host that an acquire refers to for the moment.
  std::int32_t num_used_or_pinned(int g) const {
    std::int32_t used = own_[g] + size(orphans_[g]);
    for (const auto& [name, entry] : entries_) {
      used += entry.slots[g] && entry.slots[g]->tier == KvTier::kDevice && entry.slots[g]->users > 0;
    }
    return used;
  }

  std::optional<Name> oldest(int g, KvTier tier) const {
    std::optional<Name> found;
    std::pair<std::int32_t, std::int64_t> least;
    for (const auto& [name, entry] : entries_) {
      if (entry.slots[g] && entry.slots[g]->tier == tier && entry.slots[g]->users == 0) {
        const std::pair<std::int32_t, std::int64_t> rank{entry.retention, entry.slots[g]->used};
        if (!found || rank < least) {
          found = name;
          least = rank;
        }
      }
    }
    return found;
  }

  void lose(Name name, int g) {
    if (is_full_attention(g)) {
      entries_.erase(name);
    } else {
      entries_[name].slots[g].reset();
    }
  }

  void add(const Name& name) {
    std::erase_if(entries_, [&](const auto& other) {
      return size(other.first.second) % block() != 0 && parent(other.first) == parent(name) &&
             begins_with(name, other.first);
    });
    entries_[name];
  }

  void store(Table& table, const Name& name, std::int32_t index, std::int32_t retention) {
    raise(name, retention);
    Entry& entry = entries_[name];
    entry.recency = ++now_;
    for (int g = 0; g < num_groups(); ++g) {
      Place& place = table.groups[g][index];
      if (place.kind == Place::kGone) {
        continue;
      }
      --own_[g];
      place = {Place::kShared, name};
      if (entry.slots[g] && entry.slots[g]->tier == KvTier::kDevice) {
        ++entry.slots[g]->users;
      } else {
        entry.slots[g] = Slot{KvTier::kDevice, 1, 0};
      }
    }
  }

  void raise(Name name, std::int32_t retention) {
    for (; !name.second.empty() && entries_[name].retention < retention; name = parent(name)) {
      entries_[name].retention = retention;
      for (std::optional<Slot>& slot : entries_[name].slots) {
        if (slot && slot->users == 0) {
          slot->used = ++now_;
        }
      }
    }
  }

  static bool is_orphan(const Place& place) { return place.kind == Place::kShared && place.name.first < 0; }
  int num_users(const Place& place, int g) const {
    if (place.kind != Place::kShared) {
      return place.kind == Place::kOwn ? 1 : 0;
    }
    return is_orphan(place) ? orphans_[g].at(place.name) : entries_.at(place.name).slots[g]->users;
  }

  void give_back(Place& place, int g) {
    if (place.kind == Place::kOwn) {
      --own_[g];
    } else if (is_orphan(place)) {
      if (--orphans_[g][place.name] == 0) {
        orphans_[g].erase(place.name);
      }
    } else if (place.kind == Place::kShared) {
      Slot& slot = *entries_[place.name].slots[g];
      if (--slot.users == 0) {
        slot.used = ++now_;
      }
    }
    place = {};
  }

  /// Entries without blocks, descendants and sequences that go on from them are forgotten.
  void tidy(const Table& table) {
    last_[&table] = table.epoch == epoch_ ? table.last : std::nullopt;
    const auto is_needed = [&](const Name& name, const Entry& entry) {
      const auto extends = [&](const Name& other) { return other != name && begins_with(other, name); };
      return std::any_of(entry.slots.begin(), entry.slots.end(), [](const auto& slot) { return slot.has_value(); }) ||
             std::any_of(entries_.begin(), entries_.end(), [&](const auto& other) { return extends(other.first); }) ||
             std::any_of(last_.begin(), last_.end(), [&](const auto& last) { return last.second == name; });
    };
    for (bool changed = true; changed;) {
      changed = std::erase_if(entries_, [&](const auto& item) { return !is_needed(item.first, item.second); }) > 0;
    }
  }

  KvCacheConfig config_;
  std::map<Name, Entry> entries_;
  std::array<std::int32_t, kMaxKvGroups> own_{};           ///< blocks that one table has for itself
  std::array<std::map<Name, int>, kMaxKvGroups> orphans_;  ///< users of blocks that a clear took from the tree
  std::map<const Table*, std::optional<Name>> last_;
  std::int64_t now_ = 0;
  int epoch_ = 0;
};

}  // namespace aotllm::testing
