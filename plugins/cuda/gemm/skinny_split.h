#pragma once

#include <cuda_runtime.h>

namespace aotllm::cuda {

/// The units of a matrix (tile-major, `per_tile` along k) in order, dealt out evenly to CTAs: one by one (stream-K,
/// where CTAs share tiles) or by whole tiles.
struct SkinnySplit {
  int per_tile = 1;
  int grain = 1;  ///< units that stay together
  int base = 0;   ///< each CTA has `base` grains, the first `extra` CTAs one more
  int extra = 0;

  SkinnySplit() = default;
  SkinnySplit(int tiles, int units_of_tile, int ctas, bool whole_tiles)
      : per_tile(units_of_tile), grain(whole_tiles ? units_of_tile : 1) {
    const int grains = tiles * per_tile / grain;
    base = grains / ctas;
    extra = grains % ctas;
  }

  /// First unit of a CTA; that of the CTA after the last is the number of units.
  __host__ __device__ int begin(int cta) const { return grain * (cta * base + (cta < extra ? cta : extra)); }

  /// The CTA that a unit belongs to. Needs no fewer grains than CTAs.
  __host__ __device__ int owner(int unit) const {
    const int at = unit / grain;
    const int longer = extra * (base + 1);  // grains of the CTAs that have one more
    return at < longer ? at / (base + 1) : extra + (at - longer) / base;
  }
};

}  // namespace aotllm::cuda
