#include "runner/cuda/padding.h"

#include <algorithm>
#include <bit>

#include "runner/cuda/buckets.h"

namespace aotllm::cuda {
namespace {

/// Largest batch of single tokens that is padded to a graph.
constexpr int kMaxDecodeRows = 512;
/// Likewise of a step with longer sequences: one of more rows takes the GPU so long that launches hide behind it.
constexpr int kMaxMixedRows = 1280;

/// Sizes that only bound what kernels look at are coarse, so that shapes are few: a power of two, from `least` on.
int power_of_two(int size, int least, int limit) {
  if (size == 0) return 0;
  const auto power = static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(size, least))));
  return std::max(size, std::min(power, limit));
}

}  // namespace

GraphPart graph_part(const StepShape& shape) {
  if (shape.num_tiles == 0) return shape.rows <= kMaxDecodeRows ? GraphPart::kStep : GraphPart::kNone;
  return shape.rows <= kMaxMixedRows ? GraphPart::kLayers : GraphPart::kNone;
}

StepShape padded_shape(const StepShape& shape, const ModelShape& model, int head_rows) {
  StepShape padded = shape;
  switch (graph_part(shape)) {
    case GraphPart::kNone:
      if (shape.num_queries == 0) break;
      padded.max_context = context_bucket(shape.max_context, model.max_seq_len);
      padded.num_queries = batch_bucket(shape.num_queries);
      break;
    case GraphPart::kStep:
      padded.max_context = context_bucket(shape.max_context, model.max_seq_len);
      padded.sequences = padded.num_queries = padded.rows = batch_bucket(shape.rows);
      padded.table_blocks = table_blocks(padded.max_context, model.tokens_per_block);
      if (shape.sampled > 0) padded.sampled = std::min(batch_bucket(shape.sampled), head_rows);
      break;
    case GraphPart::kLayers: {
      const StepShape most = largest_shape(model);
      const int max_queries = batch_bucket(std::min(model.max_batch_size, model.max_num_tokens));
      const int longest = std::min(shape.table_blocks * model.tokens_per_block, model.max_seq_len);
      padded.max_context = context_bucket(longest, model.max_seq_len);
      padded.table_blocks = table_blocks(padded.max_context, model.tokens_per_block);
      padded.rows = mixed_rows_bucket(shape.rows);
      padded.num_queries = power_of_two(shape.num_queries, 8, max_queries);
      padded.num_tiles = power_of_two(shape.num_tiles, 4, most.num_tiles);
      padded.sequences = power_of_two(shape.sequences, 8, most.sequences);
      break;
    }
  }
  return padded;
}

StepShape graph_key(const StepShape& shape) {
  StepShape key = shape;
  key.host_rows = 0;
  if (graph_part(shape) == GraphPart::kStep) return key;
  key.sampled = 0;
  key.greedy = true;
  key.late = false;
  return key;
}

}  // namespace aotllm::cuda
