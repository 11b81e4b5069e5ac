#include "runner/packed_adapter.h"

#include <algorithm>

#include "runner/partition.h"

namespace aotllm {
namespace {

constexpr std::size_t kLine = 64;

using Updates = std::vector<const LowRankUpdate*>;  // of one group

std::size_t a_bytes(const Updates& updates) {
  std::size_t bytes = 0;
  for (const LowRankUpdate* update : updates) bytes += update->a.size() * sizeof(float);
  return (bytes + kLine - 1) / kLine * kLine;
}

std::size_t b_bytes(const LowRankUpdate& update) {
  return cpu::segment_bytes(cpu::Format::kF32, update.out, update.rank);
}

std::size_t bytes_of(const Updates& updates) {
  std::size_t bytes = a_bytes(updates);
  for (const LowRankUpdate* update : updates) bytes += b_bytes(*update);
  return bytes;
}

/// f32 panels: for each column the 16 rows (docs/engine_format.md). `to` is zeroed.
void pack_b(const LowRankUpdate& update, float* to) {
  const std::int64_t rank = update.rank;
  for (std::int64_t row = 0; row < update.out; ++row) {
    float* panel = to + row / cpu::kPanelRows * rank * cpu::kPanelRows + row % cpu::kPanelRows;
    for (std::int64_t c = 0; c < rank; ++c) panel[c * cpu::kPanelRows] = update.b[row * rank + c];
  }
}

/// Packs into bytes_of(updates) zeroed bytes at `to`.
PackedAdapter::Group pack_group(const Updates& updates, const AdapterSites& sites, std::uint8_t* to) {
  PackedAdapter::Group group;
  auto* a = reinterpret_cast<float*>(to);
  std::uint8_t* b = to + a_bytes(updates);
  group.a = a;
  for (const LowRankUpdate* update : updates) {
    const AdapterSite& site = *sites.find(update->layer, update->module);
    a = std::copy(update->a.begin(), update->a.end(), a);
    pack_b(*update, reinterpret_cast<float*>(b));
    group.parts.push_back(
        {site.linear, site.row_begin, group.ranks, {cpu::Format::kF32, update->out, update->rank, b}});
    group.ranks += update->rank;
    group.k = update->in;
    b += b_bytes(*update);
  }
  return group;
}

}  // namespace

PackedAdapter::PackedAdapter(const Adapter& adapter, const AdapterSites& sites) {
  std::vector<Updates> groups(static_cast<std::size_t>(sites.num_groups()));
  for (const LowRankUpdate& update : adapter.updates) {
    groups[sites.find(update.layer, update.module)->group].push_back(&update);
  }
  std::size_t bytes = 0;
  for (const Updates& updates : groups) bytes += bytes_of(updates);
  memory_ = PageBuffer(bytes);
  std::uint8_t* at = memory_.data();
  for (const Updates& updates : groups) {
    groups_.push_back(pack_group(updates, sites, at));
    at += bytes_of(updates);
  }
}

int PackedAdapter::widest() const noexcept {
  int ranks = 0;
  for (const Group& group : groups_) ranks = std::max(ranks, group.ranks);
  return ranks;
}

}  // namespace aotllm
