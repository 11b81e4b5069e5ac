#include <algorithm>
#include <bit>
#include <numbers>
#include <string>

#include "aotllm/errors.h"
#include "attention/attention.h"
#include "attention/decode_launch.h"
#include "attention/decode_params.cuh"
#include "ceil_div.h"
#include "sm80/attention.h"

namespace aotllm::cuda {

namespace {

constexpr long long kSlots = 2 * 132;  ///< two CTAs on each of 132 multiprocessors
constexpr int kSplitUnit = 64;         ///< ranges are multiples of it: a box of the cache never straddles two
constexpr std::size_t kCounterBytes = std::size_t{kDecodeMaxCounters} * sizeof(std::uint32_t);

constexpr std::size_t align(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

int max_ranges(int max_context, int split_tokens) {
  return std::max(1, ceil_div(max_context, split_tokens));
}
std::size_t sums_bytes(int num_queries, int num_heads, int ranges) {
  return align(static_cast<std::size_t>(num_queries) * static_cast<std::size_t>(num_heads) *
               static_cast<std::size_t>(ranges) * sizeof(float2));
}

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorKind::kInternal, "decode attention: " + what);
}

}  // namespace

void check_decode_args(const DecodeAttentionArgs& args) {
  const KvLayerView& kv = args.kv;
  require(kv.head_dim == 64 || kv.head_dim == 96 || kv.head_dim == 128 || kv.head_dim == 256,
          "head_dim " + std::to_string(kv.head_dim) + ", allowed: 64, 96, 128, 256");
  require(
      kv.num_kv_heads > 0 && args.num_heads > 0 && args.num_heads % kv.num_kv_heads == 0,
      std::to_string(args.num_heads) + " heads are no multiple of " + std::to_string(kv.num_kv_heads) + " KV heads");
  require(
      kv.tokens_per_block == 16 || kv.tokens_per_block == 32 || kv.tokens_per_block == 64 || kv.tokens_per_block == 128,
      "tokens_per_block " + std::to_string(kv.tokens_per_block) + ", allowed: 16, 32, 64, 128");
  require(args.split_tokens > 0 && args.split_tokens % kSplitUnit == 0,
          "split_tokens " + std::to_string(args.split_tokens) + " is no positive multiple of 64");
  require(args.max_context <= kDecodeMaxContext,
          "max_context " + std::to_string(args.max_context) + ", at most " + std::to_string(kDecodeMaxContext));
  const std::size_t bytes =
      decode_workspace_bytes(args.num_queries, args.num_heads, kv.head_dim, args.max_context, args.split_tokens);
  require(args.workspace_bytes >= bytes,
          "workspace of " + std::to_string(args.workspace_bytes) + " bytes, needed: " + std::to_string(bytes));
  if (args.fused == nullptr) return;
  const RopeKvArgs& rope = *args.fused;
  require(decode_can_fuse(rope), "a rotary half of " + std::to_string(rope.rotary_half) + " of heads of " +
                                     std::to_string(rope.head_dim) + " cannot be fused; call rope_kv before");
  require(rope.num_heads == args.num_heads && rope.num_kv_heads == kv.num_kv_heads && rope.head_dim == kv.head_dim,
          "what is fused has other heads");
}

int decode_split_tokens(int num_queries, int num_kv_heads, int max_context, int tokens_per_block) {
  // A range of a split context costs a CTA 0.8 µs beside its tokens (measured), so ranges have at least 256 tokens;
  // little work becomes up to two ranges for each CTA, much work ranges of 1024, which balance ragged contexts. Each
  // range has a place in the workspace, which bounds their number.
  constexpr long long kMaxRanges = 16384;
  const long long unit = std::max(kSplitUnit, tokens_per_block);
  const long long context = std::max(1, max_context);
  const long long pairs = static_cast<long long>(std::max(1, num_queries)) * std::max(1, num_kv_heads);
  const long long tokens = pairs * context;
  const long long share = (tokens + kSlots - 1) / kSlots;
  long long split = std::clamp(share / 2, 256LL, 1024LL);
  split = std::max(split, (tokens + kMaxRanges - 1) / kMaxRanges);
  // What a cluster combines may be shorter. Clusters of more than two CTAs find their places only where each CTA may
  // have a multiprocessor to itself (8 queries x 200 tokens: 5.3 µs with clusters of 2, 10.8 with 4).
  const long long ranges =
      std::max(std::min<long long>(kSlots / 2 / pairs, kDecodeMaxCluster), std::min<long long>(kSlots / pairs, 2));
  if (ranges > 1) split = std::min(split, (context + ranges - 1) / ranges);
  if (pairs > kDecodeMaxCounters) split = context;
  split = std::min(split, context);
  return static_cast<int>((split + unit - 1) / unit * unit);
}

// [counters][maxima and sums][values]. The counters have the same place and size whatever the arguments are, so that
// launches of different shapes can share a workspace.
std::size_t decode_workspace_bytes(int num_queries, int num_heads, int head_dim, int max_context, int split_tokens) {
  const int ranges = max_ranges(max_context, split_tokens);
  if (ranges == 1) return 0;
  return kCounterBytes + sums_bytes(num_queries, num_heads, ranges) +
         align(static_cast<std::size_t>(num_queries) * static_cast<std::size_t>(num_heads) *
               static_cast<std::size_t>(ranges) * static_cast<std::size_t>(head_dim) * sizeof(float));
}

DecodeRangeResults decode_range_results(const DecodeAttentionArgs& args) {
  std::uint8_t* results = static_cast<std::uint8_t*>(args.workspace) + kCounterBytes;
  const int ranges = max_ranges(args.max_context, args.split_tokens);
  return {reinterpret_cast<float2*>(results),
          reinterpret_cast<float*>(results + sums_bytes(args.num_queries, args.num_heads, ranges))};
}

bool decode_can_fuse(const RopeKvArgs& rope) {
  return rotates_in_eights(rope);
}

bool decode_prefers_fused(const RopeKvArgs& rope, KvType type, int num_queries, int max_context, int tokens_per_block) {
  if (!decode_can_fuse(rope)) return false;
  const int split = decode_split_tokens(num_queries, rope.num_kv_heads, max_context, tokens_per_block);
  const long long pairs = static_cast<long long>(num_queries) * rope.num_kv_heads;
  const long long ranges = max_ranges(max_context, split);
  if (pairs * ranges <= kSlots) return true;
  // Later items cost a CTA's consumers what they save the chain: much work is done sooner by two kernels where every
  // range makes its queries anew, and where the consumers are what it waits for.
  return ranges == 1 && (type == KvType::kBf16 || pairs <= 512);
}

void decode_attention(const DecodeAttentionArgs& args, const Stream& stream) {
  if (stream.sm < 90) return sm80::decode_attention(args, stream);
  decode_attention(args, DecodeTuning{}, stream);
}

void decode_attention(const DecodeAttentionArgs& args, const DecodeTuning& tuning, const Stream& stream) {
  if (args.num_queries <= 0 || args.max_context <= 0) return;
  check_decode_args(args);
  const KvLayerView& kv = args.kv;
  DecodeParams params{};
  params.group = args.num_heads / kv.num_kv_heads;
  // Tiles of a large group are of equal size.
  params.tiles_per_kv_head = std::max(1, ceil_div(params.group, 16));
  params.tile_heads = ceil_div(params.group, params.tiles_per_kv_head);
  params.plan.num_queries = args.num_queries;
  params.plan.head_tiles = kv.num_kv_heads * params.tiles_per_kv_head;
  const int counters = args.num_queries * params.plan.head_tiles;
  require(args.split_tokens >= args.max_context || counters <= kDecodeMaxCounters,
          "a split of " + std::to_string(counters) + " contexts, at most " + std::to_string(kDecodeMaxCounters));
  params.plan.split_tokens = args.split_tokens;
  params.plan.window = args.window;
  params.max_ranges = max_ranges(args.max_context, args.split_tokens);

  if (params.max_ranges > 1) {
    params.counters = static_cast<std::uint32_t*>(args.workspace);
    const DecodeRangeResults results = decode_range_results(args);
    params.range_sums = results.sums;
    params.range_values = results.values;
  }
  params.q = args.q;
  params.out = args.out;
  params.codes = args.codes;
  params.queries = args.queries;
  params.block_table = kv.block_table;
  params.table_stride = kv.table_stride;
  params.block_shift = std::countr_zero(static_cast<unsigned>(kv.tokens_per_block));
  params.num_heads = args.num_heads;
  params.box_tokens = std::min({tuning.box_tokens > 0 ? tuning.box_tokens : 64, kv.tokens_per_block, 64});
  constexpr float kLog2E = std::numbers::log2e_v<float>;
  params.cap = args.softcap > 0.0f ? args.softcap * kLog2E : 0.0f;
  params.score_scale = args.softcap > 0.0f ? 2.0f * kLog2E * args.scale / args.softcap : args.scale * kLog2E;
  if (args.fused != nullptr) {
    params.fused = true;
    params.rope = *args.fused;
    params.rope.kv = kv;
    params.layout = head_layout(params.rope, 8);
  }
  if (kv.type == KvType::kBf16) {
    launch_decode_bf16(args, tuning, params, stream);
  } else {
    launch_decode_fp8(args, tuning, params, stream);
  }
}

}  // namespace aotllm::cuda
