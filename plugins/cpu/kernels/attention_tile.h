#pragma once

#include "kernels/ops.h"
#include "kernels/simd.h"

// What attention works on at a time: a tile of 64 tokens, in parts of 16, and a batch of query vectors (one head of one
// row each). Tiles are aligned to absolute positions.

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr int kTileTokens = 64;
inline constexpr int kTileParts = kTileTokens / kLanes;
inline constexpr int kMaxVectors = max_attention_vectors(8);
inline constexpr int kMaxVectorFloats = 4096;

/// Tokens of a tile that a vector sees, or parts: [begin, end).
struct Span {
  int begin;
  int end;
};

/// Where the parts that some row sees stand; pointers of the others are null.
struct Tile {
  int first;                          ///< position of the first token
  const std::uint8_t* k[kTileParts];  ///< K of the part's block and KV head
  const std::uint8_t* v[kTileParts];
  int slot[kTileParts];  ///< of the part's first token in its block
};

/// The parts of the tile at `first` that hold positions in [from, to].
inline Tile tile_at(const AttentionArgs& args, int first, int from, int to) {
  Tile tile{first, {}, {}, {}};
  for (int part = 0; part < kTileParts; ++part) {
    const int at = first + part * kLanes;
    if (at + kLanes <= from || at > to) continue;
    const std::ptrdiff_t block = args.block_stride * args.block_table[at / args.tokens_per_block];
    tile.k[part] = args.k_base + block;
    tile.v[part] = args.v_base + block;
    tile.slot[part] = at % args.tokens_per_block;
  }
  return tile;
}

/// The tile at hand, and the one whose lines are fetched meanwhile.
struct Tiles {
  Tile now;
  Tile next;

  /// The blocks of the same part of the next tile; those at hand where that has no such part.
  const std::uint8_t* k_ahead(int part) const { return next.k[part] != nullptr ? next.k[part] : now.k[part]; }
  const std::uint8_t* v_ahead(int part) const { return next.v[part] != nullptr ? next.v[part] : now.v[part]; }
};

/// The query vectors of a call and their running state over one range.
template <class Element>
struct Vectors {
  int count;
  int stride;  ///< floats from a vector to the next, a multiple of 16
  alignas(64) Element q[kMaxVectorFloats];
  alignas(64) float out[kMaxVectorFloats];     ///< Σ p · v
  alignas(64) float sum[kMaxVectors][kLanes];  ///< Σ p, by lane
  float top[kMaxVectors];                      ///< p = 2^(score - top)
  float scale[kMaxVectors];                    ///< of scores as the cache gives them
};

/// What a batch of G vectors has of a tile.
template <class Element, int G>
struct Weights {
  alignas(64) Element p[G][kTileTokens];
  float scale[G];
};

}  // namespace aotllm::cpu::AOTLLM_ISA
