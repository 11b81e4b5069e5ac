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

/// Tokens of a tile that a vector sees, or parts, or vectors: [begin, end).
struct Span {
  int begin;
  int end;
};

/// What a vector sees of a tile: `tokens` of it, [0, 64) at most.
struct Seen {
  Span tokens;
  bool is_whole;
  Mask16 lanes[kTileParts];  ///< unless all is seen

  Seen() = default;
  explicit Seen(Span seen) : tokens(seen), is_whole(seen.begin == 0 && seen.end == kTileTokens) {
    if (is_whole) return;
    const auto clip = [](int lane) { return lane < 0 ? 0 : lane > kLanes ? kLanes : lane; };
    for (int part = 0; part < kTileParts; ++part) {
      lanes[part] = lanes_between(clip(seen.begin - part * kLanes), clip(seen.end - part * kLanes));
    }
  }

  /// The values of a part that are seen, and `unseen`. `Whole` is `is_whole`.
  template <bool Whole>
  F32x16 only(int part, F32x16 x, F32x16 unseen) const {
    if constexpr (Whole) return x;
    return select(lanes[part], x, unseen);
  }
};

constexpr int round_up_to_4(int n) {
  return (n + 3) / 4 * 4;
}

/// Where 16 tokens stand.
struct Part {
  const std::uint8_t* k;  ///< K of their block and KV head
  const std::uint8_t* v;
  int slot;  ///< of the first one in the block
};

/// The part that holds `position`.
inline Part part_at(const AttentionArgs& args, int position) {
  const std::ptrdiff_t block = args.block_stride * args.block_table[position / args.tokens_per_block];
  return {args.k_base + block, args.v_base + block, position % args.tokens_per_block / kLanes * kLanes};
}

/// The parts of a tile. Those that no row sees are copies of one that some row does.
struct Tile {
  int first;  ///< position of the first token
  Part parts[kTileParts];
  Part ahead[kTileParts];  ///< whose lines are fetched while the part is worked on
};

/// The parts that a call reads, in the order in which it does, and behind them those of the call that follows: lines
/// are fetched a tile ahead of their use, over the ends of calls too, which may be shorter than that.
class PartWalk {
 public:
  explicit PartWalk(const AttentionArgs& args)
      : args_(args), from_(args.first_seen(args.position)), to_(args.last_position()) {}

  /// The tile at `first`, of which some row sees something.
  Tile tile_at(int first) const {
    Tile tile;
    tile.first = first;
    for (int i = 0; i < kTileParts; ++i) {
      const int at = first + i * kLanes;
      tile.parts[i] = part_at(args_, at < from_ ? from_ : at > to_ ? to_ : at);
      tile.ahead[i] = ahead(at + kTileTokens, tile.parts[i]);
    }
    return tile;
  }

 private:
  /// What this call reads at `at`, or the next one so far behind its first part as `at` is behind this one's last.
  Part ahead(int at, const Part& otherwise) const {
    if (at <= to_) return part_at(args_, at);
    if (args_.next == nullptr) return otherwise;
    const AttentionArgs& next = *args_.next;
    const int behind = at - (to_ / kLanes + 1) * kLanes;
    const int there = next.first_seen(next.position) / kLanes * kLanes + behind;
    return there <= next.last_position() ? part_at(next, there) : otherwise;
  }

  const AttentionArgs& args_;
  const int from_;
  const int to_;
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
  alignas(64) float scale[kLanes];
};

}  // namespace aotllm::cpu::AOTLLM_ISA
