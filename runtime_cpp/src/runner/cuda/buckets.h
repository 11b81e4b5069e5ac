#pragma once

#include <algorithm>

// Steps are padded to few sizes, each of which is a CUDA graph.
namespace aotllm::cuda {

/// The size that a batch of `size` ≥ 1 sequences runs as: 1, 2, 4, then steps of an eighth of it or less.
constexpr int batch_bucket(int size) {
  if (size <= 2) return size;
  if (size <= 4) return 4;
  const int step = size <= 64 ? 8 : size <= 128 ? 16 : size <= 256 ? 32 : 64;
  return (size + step - 1) / step * step;
}

/// The rows that a step with prompts, of `rows` ≥ 1 of them, runs as: whole tiles of GEMMs where there are many.
constexpr int mixed_rows_bucket(int rows) {
  return rows <= 512 ? batch_bucket(rows) : (rows + 127) / 128 * 128;
}

/// The bound that contexts of up to `context` ≥ 1 tokens are planned for: powers of two from 256, at most `limit`.
constexpr int context_bucket(int context, int limit) {
  int bucket = 256;
  while (bucket < context) bucket *= 2;
  return std::max(context, std::min(bucket, limit));
}

}  // namespace aotllm::cuda
