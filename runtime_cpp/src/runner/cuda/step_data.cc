#include "runner/cuda/step_data.h"

#include <algorithm>

#include "elementwise/mapped_copy.h"

namespace aotllm::cuda {
namespace {

constexpr std::size_t kAlignment = 128;

bool is_query(const SequenceStep& sequence) {
  return sequence.tokens.size() == 1;
}

int num_tiles(const SequenceStep& sequence) {
  return static_cast<int>((sequence.tokens.size() + kContextTileRows - 1) / kContextTileRows);
}

/// Its row needs more than a plain draw.
bool is_late(const SequenceStep& sequence) {
  return sequence.sampling->mask >= 0 || sequence.sampling->num_logprobs >= 0 || sequence.penalties.slot >= 0;
}

std::int32_t end_position(const SequenceStep& sequence) {
  return sequence.start_position + static_cast<std::int32_t>(sequence.tokens.size());
}

}  // namespace

struct StepData::Offsets {
  std::size_t tokens, positions, sequences, queries, tiles;
  std::array<std::size_t, kMaxKvGroups> tables;
  std::size_t sampled_rows, sampling, penalties, logprob_rows;  // behind all that layers read
  std::size_t host_rows;                                        // behind all that a graph reads
  std::size_t end;
};

StepShape largest_shape(const ModelShape& model) {
  StepShape most;
  most.rows = most.host_rows = model.max_num_tokens + kDeviceRowStep;
  most.num_queries = most.sequences = most.sampled =
      std::min(model.max_batch_size, model.max_num_tokens) + kDeviceRowStep;
  most.late = true;
  most.max_context = model.max_seq_len;
  most.table_blocks = table_blocks(model.max_seq_len, model.tokens_per_block);
  most.num_tiles = model.max_num_tokens / kContextTileRows + most.num_queries;
  return most;
}

StepData::StepData(const ModelShape& shape)
    : num_groups_(static_cast<int>(shape.kv_groups.size())), tokens_per_block_(shape.tokens_per_block) {
  const StepShape most = largest_shape(shape);
  for (PinnedArray<std::uint8_t>& host : host_) host = PinnedArray<std::uint8_t>(offsets(most).end);
  device_ = DeviceArray<std::uint8_t>(host_[0].size());
}

StepData::Offsets StepData::offsets(const StepShape& shape) const {
  Offsets to{};
  const auto place = [&to](std::size_t bytes) {
    const std::size_t at = to.end;
    to.end = (at + bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  const auto words = [](int count) { return sizeof(std::int32_t) * static_cast<std::size_t>(count); };
  to.tokens = place(words(shape.rows));
  to.positions = place(words(shape.rows));
  to.sequences = place(words(shape.rows));
  to.queries = place(sizeof(DecodeQuery) * static_cast<std::size_t>(shape.num_queries));
  to.tiles = place(sizeof(ContextTile) * static_cast<std::size_t>(shape.num_tiles));
  for (int group = 0; group < num_groups_; ++group) {
    to.tables[static_cast<std::size_t>(group)] =
        place(words(shape.sequences) * static_cast<std::size_t>(shape.table_blocks));
  }
  to.sampled_rows = place(words(shape.sampled));
  to.sampling = place(sizeof(RowSampling) * static_cast<std::size_t>(shape.sampled));
  const int late = shape.late ? shape.sampled : 0;
  to.penalties = place(sizeof(RowPenalties) * static_cast<std::size_t>(late));
  to.logprob_rows = place(words(late));
  to.host_rows = place(words(shape.host_rows));
  return to;
}

StepShape StepData::shape_of(std::span<const SequenceStep> sequences, bool always_tiles) const {
  StepShape shape;
  shape.sequences = static_cast<int>(sequences.size());
  for (const SequenceStep& sequence : sequences) {
    const int rows = static_cast<int>(sequence.tokens.size());
    shape.rows += rows;
    shape.table_blocks = std::max(shape.table_blocks, table_blocks(end_position(sequence), tokens_per_block_));
    if (is_query(sequence) && !always_tiles) {
      ++shape.num_queries;
      shape.max_context = std::max(shape.max_context, end_position(sequence));
    } else {
      shape.num_tiles += num_tiles(sequence);
    }
    if (sequence.is_sampled()) {
      ++shape.sampled;
      shape.greedy = shape.greedy && sequence.sampling->temperature == 0.0f;
      shape.late = shape.late || is_late(sequence);
    } else {
      shape.host_rows += static_cast<int>(sequence.num_output_rows());
    }
  }
  return shape;
}

void StepData::pack(std::span<const SequenceStep> sequences, const StepShape& shape) {
  const Offsets to = offsets(shape);
  bytes_ = to.end;
  turn_ ^= 1;
  pack_rows(sequences, shape, to);
  pack_attention(sequences, shape, to);
  pack_outputs(sequences, shape, to);
}

void StepData::pack_rows(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to) {
  auto* tokens = at<std::int32_t>(to.tokens);
  auto* positions = at<std::int32_t>(to.positions);
  auto* owners = at<std::int32_t>(to.sequences);
  int row = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const SequenceStep& sequence = sequences[i];
    for (std::size_t t = 0; t < sequence.tokens.size(); ++t, ++row) {
      tokens[row] = sequence.fed < 0 ? sequence.tokens[t] : -1 - sequence.fed;
      positions[row] = sequence.start_position + static_cast<std::int32_t>(t);
      owners[row] = static_cast<std::int32_t>(i);
    }
    for (int group = 0; group < num_groups_; ++group) {
      const auto g = static_cast<std::size_t>(group);
      const std::span<const BlockId> table = sequence.block_tables[g];
      const auto stride = static_cast<std::size_t>(shape.table_blocks);
      std::copy_n(table.data(), std::min(table.size(), stride), at<std::int32_t>(to.tables[g]) + i * stride);
    }
  }
  for (; row < shape.rows; ++row) {
    tokens[row] = 0;
    positions[row] = 0;
    owners[row] = -1;
  }
}

void StepData::pack_attention(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to) {
  auto* queries = at<DecodeQuery>(to.queries);
  auto* tiles = at<ContextTile>(to.tiles);
  int num_queries = 0;
  int tile_count = 0;
  std::int32_t row = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const SequenceStep& sequence = sequences[i];
    const auto rows = static_cast<std::int32_t>(sequence.tokens.size());
    const auto index = static_cast<std::int32_t>(i);
    if (is_query(sequence) && num_queries < shape.num_queries) {
      queries[num_queries++] = {row, index, end_position(sequence)};
    } else {
      for (std::int32_t begin = 0; begin < rows; begin += kContextTileRows) {
        tiles[tile_count++] = {row + begin, std::min(rows - begin, kContextTileRows), index,
                               sequence.start_position + begin};
      }
    }
    row += rows;
  }
  // The longest first, so that none begins when all others are done.
  std::sort(tiles, tiles + tile_count, [](const ContextTile& a, const ContextTile& b) {
    return std::pair(-a.position - a.rows, a.row) < std::pair(-b.position - b.rows, b.row);
  });
  std::fill(queries + num_queries, queries + shape.num_queries, DecodeQuery{});
  std::fill(tiles + tile_count, tiles + shape.num_tiles, ContextTile{});
}

void StepData::pack_outputs(std::span<const SequenceStep> sequences, const StepShape& shape, const Offsets& to) {
  auto* sampled_rows = at<std::int32_t>(to.sampled_rows);
  auto* sampling = at<RowSampling>(to.sampling);
  auto* penalties = at<RowPenalties>(to.penalties);
  auto* logprob_rows = at<std::int32_t>(to.logprob_rows);
  logit_rows_.clear();
  hidden_rows_.clear();
  int sampled = 0;
  std::int32_t row = 0;
  for (const SequenceStep& sequence : sequences) {
    const std::int32_t end = row + static_cast<std::int32_t>(sequence.tokens.size());
    if (sequence.is_sampled()) {
      sampled_rows[sampled] = end - 1;
      if (shape.late) penalties[sampled] = sequence.penalties;
      if (shape.late && sequence.sampling->num_logprobs >= 0) *logprob_rows++ = sampled;
      sampling[sampled++] = *sequence.sampling;
    } else {
      std::vector<std::int32_t>& rows = sequence.hidden ? hidden_rows_ : logit_rows_;
      for (auto r = end - static_cast<std::int32_t>(sequence.num_output_rows()); r < end; ++r) rows.push_back(r);
    }
    row = end;
  }
  for (; sampled < shape.sampled; ++sampled) {  // padding of a graph
    sampled_rows[sampled] = 0;
    sampling[sampled] = RowSampling{};
    if (shape.late) penalties[sampled] = RowPenalties{};
  }
  auto* host_rows = at<std::int32_t>(to.host_rows);
  host_rows = std::copy(logit_rows_.begin(), logit_rows_.end(), host_rows);
  std::copy(hidden_rows_.begin(), hidden_rows_.end(), host_rows);
}

void StepData::upload(cudaStream_t stream) const {
  copy_mapped(device_.data(), host_[turn_].device(), bytes_, stream);
}

StepView StepData::view(const StepShape& shape) const {
  const Offsets from = offsets(shape);
  const auto words = [&](std::size_t offset) { return reinterpret_cast<const std::int32_t*>(device_.data() + offset); };
  StepView view;
  view.tokens = words(from.tokens);
  view.positions = words(from.positions);
  view.sequences = words(from.sequences);
  view.sampled_rows = words(from.sampled_rows);
  view.host_rows = words(from.host_rows);
  view.queries = reinterpret_cast<const DecodeQuery*>(device_.data() + from.queries);
  view.tiles = reinterpret_cast<const ContextTile*>(device_.data() + from.tiles);
  view.sampling = reinterpret_cast<const RowSampling*>(device_.data() + from.sampling);
  view.penalties = reinterpret_cast<const RowPenalties*>(device_.data() + from.penalties);
  view.logprob_rows = words(from.logprob_rows);
  for (int group = 0; group < num_groups_; ++group) {
    view.block_tables[static_cast<std::size_t>(group)] = words(from.tables[static_cast<std::size_t>(group)]);
  }
  return view;
}

}  // namespace aotllm::cuda
