#include <cstring>

#include "aotllm/errors.h"
#include "elementwise/elementwise.h"
#include "elementwise_check.h"

namespace aotllm::cuda {
namespace {

struct Case {
  int num_heads = 8;
  int num_kv_heads = 2;
  int head_dim = 128;
  int rotary_half = 64;
  bool q_norm = false;
  bool k_norm = false;
  KvType kv = KvType::kBf16;
  int tokens_per_block = 64;
  float attention_factor = 1.0f;
  int m = 70;

  int heads() const { return num_heads + 2 * num_kv_heads; }
  std::string name() const {
    return std::to_string(num_heads) + "/" + std::to_string(num_kv_heads) + " heads of " + std::to_string(head_dim) +
           ", rotary half " + std::to_string(rotary_half) + (kv == KvType::kFp8 ? ", fp8" : "") + ", m " +
           std::to_string(m);
  }
};

constexpr float kEps = 1e-6f;

// Rows of three sequences that start at positions of very different size, with padding rows between them.
struct Batch {
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> sequences;
  std::vector<std::int32_t> table;  // [3, stride]; -1 where nothing may be read
  int stride = 0;
  int num_blocks = 0;

  explicit Batch(const Case& c) {
    const int begins[3] = {0, 4091, (1 << 20) - c.m};
    stride = (1 << 20) / c.tokens_per_block;
    table.assign(static_cast<std::size_t>(3) * stride, -1);
    int next[3] = {begins[0], begins[1], begins[2]};
    num_blocks = 1;  // block 0 is nobody's
    for (int t = 0; t < c.m; ++t) {
      const int sequence = t % 5 == 3 ? -1 : static_cast<int>(random_engine()() % 3);
      sequences.push_back(sequence);
      positions.push_back(sequence < 0 ? 0 : next[sequence]++);
      if (sequence < 0) continue;
      std::int32_t& block = table[static_cast<std::size_t>(sequence) * stride + positions[t] / c.tokens_per_block];
      if (block < 0) block = num_blocks++;
    }
  }
};

// One head after norm and rotation, float64 but for the angle.
struct Head {
  std::vector<double> values;
  std::vector<double> magnitudes;  // what float32 errors are relative to
};

Head reference_head(const Case& c, const Bf16* from, const float* norm, bool rotates, int position,
                    const std::vector<float>& inv_freq) {
  Head head;
  double squares = 0.0;
  for (int d = 0; d < c.head_dim; ++d) {
    head.values.push_back(from_bf16(from[d]));
    squares += head.values[d] * head.values[d];
  }
  if (norm != nullptr) {
    const double rstd = 1.0 / std::sqrt(squares / c.head_dim + kEps);
    for (int d = 0; d < c.head_dim; ++d) head.values[d] *= rstd * norm[d];
  }
  for (double value : head.values) head.magnitudes.push_back(std::abs(value));
  for (int i = 0; rotates && i < c.rotary_half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    const double cosine = std::cos(static_cast<double>(angle)) * c.attention_factor;
    const double sine = std::sin(static_cast<double>(angle)) * c.attention_factor;
    const double a = head.values[i];
    const double b = head.values[i + c.rotary_half];
    head.values[i] = a * cosine - b * sine;
    head.values[i + c.rotary_half] = b * cosine + a * sine;
    head.magnitudes[i] = head.magnitudes[i + c.rotary_half] = (std::abs(a) + std::abs(b)) * c.attention_factor;
  }
  return head;
}

struct Checker {
  const Case& c;
  Worst q;
  Worst kv;
  std::vector<bool> written;  // bytes of the cache

  double allowed(const Head& head, int d, bool fp8) const {
    const double value = std::abs(head.values[d]);
    const double rounding = fp8 ? kHalfUlpFp8 * value + kHalfStepFp8 : kHalfUlpBf16 * value;
    return rounding * 1.0001 + 2e-6 * head.magnitudes[d] + 1e-30;
  }
  void check_q(const Head& head, const std::vector<Bf16>& got, std::int64_t begin) {
    for (int d = 0; d < c.head_dim; ++d) {
      q.add(begin + d, from_bf16(got[begin + d]), head.values[d], allowed(head, d, false));
    }
  }
  void check_kv(const Head& head, const std::vector<std::uint8_t>& cache, std::int64_t begin) {
    const bool fp8 = c.kv == KvType::kFp8;
    const int bytes = fp8 ? 1 : 2;
    for (int d = 0; d < c.head_dim; ++d) {
      const std::int64_t at = begin + d * bytes;
      Bf16 value;
      std::memcpy(&value, cache.data() + at, sizeof value);
      kv.add(at, fp8 ? from_fp8(cache[at]) : from_bf16(value), head.values[d], allowed(head, d, fp8));
      for (int b = 0; b < bytes; ++b) written[at + b] = true;
    }
  }
};

void run_case(const Case& c) {
  const Batch batch(c);
  const std::vector<Bf16> qkv = random_bf16(static_cast<std::size_t>(c.m) * c.heads() * c.head_dim, 2.0f);
  const std::vector<float> q_norm = random_normal(c.head_dim);
  const std::vector<float> k_norm = random_normal(c.head_dim);
  std::vector<float> inv_freq(c.rotary_half);
  for (int i = 0; i < c.rotary_half; ++i) inv_freq[i] = static_cast<float>(std::pow(5e5, -1.0 * i / c.rotary_half));
  const int element = static_cast<int>(element_bytes(c.kv));
  const std::int64_t piece = static_cast<std::int64_t>(c.tokens_per_block) * c.head_dim * element;
  const std::size_t stride = (2 * c.num_kv_heads * piece + 255) / 256 * 256 + 256;

  const DeviceArray<Bf16> device_qkv(qkv);
  const DeviceArray<float> device_q_norm(q_norm), device_k_norm(k_norm), device_freq(inv_freq);
  const DeviceArray<std::int32_t> positions(batch.positions), sequences(batch.sequences), table(batch.table);
  DeviceArray<Bf16> q(static_cast<std::size_t>(c.m + 1) * c.num_heads * c.head_dim);
  DeviceArray<std::uint8_t> cache(stride * batch.num_blocks);
  q.fill(0xFF);
  cache.fill(0xFF);

  RopeKvArgs args;
  args.qkv = device_qkv.data();
  args.q = q.data();
  args.m = c.m;
  args.num_heads = c.num_heads;
  args.num_kv_heads = c.num_kv_heads;
  args.head_dim = c.head_dim;
  if (c.q_norm) args.q_norm = device_q_norm.data();
  if (c.k_norm) args.k_norm = device_k_norm.data();
  args.qk_norm_eps = kEps;
  args.inv_freq = device_freq.data();
  args.rotary_half = c.rotary_half;
  args.attention_factor = c.attention_factor;
  args.positions = positions.data();
  args.sequences = sequences.data();
  args.kv = {c.kv,       cache.data(),       stride,       batch.num_blocks, c.num_kv_heads,
             c.head_dim, c.tokens_per_block, table.data(), batch.stride};
  rope_kv(args, Stream{});

  const std::vector<Bf16> got_q = q.download();
  const std::vector<std::uint8_t> got_cache = cache.download();
  Checker checker{c, {}, {}, std::vector<bool>(got_cache.size())};
  for (int t = 0; t < c.m; ++t) {
    const int sequence = batch.sequences[t];
    const int position = batch.positions[t];
    for (int h = 0; h < c.heads(); ++h) {
      const bool is_q = h < c.num_heads;
      const bool is_v = h >= c.num_heads + c.num_kv_heads;
      const std::int64_t q_begin = (static_cast<std::int64_t>(t) * c.num_heads + h) * c.head_dim;
      if (sequence < 0) {
        for (int d = 0; is_q && d < c.head_dim; ++d) ASSERT_EQ(__bfloat16_as_ushort(got_q[q_begin + d]), 0xFFFF);
        continue;
      }
      const float* norm = is_q ? (c.q_norm ? q_norm.data() : nullptr) : (c.k_norm && !is_v ? k_norm.data() : nullptr);
      const Bf16* from = qkv.data() + (static_cast<std::size_t>(t) * c.heads() + h) * c.head_dim;
      const Head head = reference_head(c, from, norm, !is_v, position, inv_freq);
      if (is_q) {
        checker.check_q(head, got_q, q_begin);
        continue;
      }
      const int block = batch.table[static_cast<std::size_t>(sequence) * batch.stride + position / c.tokens_per_block];
      const int kv_head = (h - c.num_heads) % c.num_kv_heads;
      const std::int64_t begin = block * static_cast<std::int64_t>(stride) +
                                 (is_v ? c.num_kv_heads + kv_head : kv_head) * piece +
                                 static_cast<std::int64_t>(position % c.tokens_per_block) * c.head_dim * element;
      checker.check_kv(head, got_cache, begin);
    }
  }
  checker.q.expect(c.name() + " q");
  checker.kv.expect(c.name() + " kv");
  std::size_t spilt = 0;
  for (std::size_t i = 0; i < got_cache.size(); ++i) spilt += !checker.written[i] && got_cache[i] != 0xFF;
  EXPECT_EQ(spilt, 0u) << c.name();
  EXPECT_TRUE(untouched(bytes_from(got_q, static_cast<std::size_t>(c.m) * c.num_heads * c.head_dim))) << c.name();
}

TEST(RopeKv, HeadShapesCachesAndBlocks) {
  AOTLLM_NEEDS_GPU();
  for (const KvType kv : {KvType::kBf16, KvType::kFp8}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      for (const int tokens_per_block : {16, 128}) {
        run_case({.head_dim = head_dim, .rotary_half = head_dim / 2, .kv = kv, .tokens_per_block = tokens_per_block});
      }
    }
    run_case({.num_heads = 32, .num_kv_heads = 8, .kv = kv, .m = 300});
    run_case({.num_heads = 71, .num_kv_heads = 1, .head_dim = 64, .rotary_half = 32, .kv = kv});
    run_case({.num_heads = 128, .num_kv_heads = 8, .kv = kv, .m = 3});
    run_case({.num_heads = 1, .num_kv_heads = 1, .kv = kv, .tokens_per_block = 32, .m = 1});
  }
}

TEST(RopeKv, PartialRotaryAndNone) {
  AOTLLM_NEEDS_GPU();
  for (const KvType kv : {KvType::kBf16, KvType::kFp8}) {
    for (const int rotary_half : {0, 4, 8, 16, 20, 32, 33}) {
      run_case({.head_dim = 128, .rotary_half = rotary_half, .kv = kv, .m = 17});
      run_case({.head_dim = 80, .rotary_half = rotary_half, .q_norm = true, .k_norm = true, .kv = kv, .m = 17});
    }
  }
}

TEST(RopeKv, NormsOfQueriesAndKeys) {
  AOTLLM_NEEDS_GPU();
  for (const KvType kv : {KvType::kBf16, KvType::kFp8}) {
    for (const int head_dim : {64, 96, 128, 256}) {
      run_case({.num_heads = 5,
                .num_kv_heads = 1,
                .head_dim = head_dim,
                .rotary_half = head_dim / 2,
                .q_norm = true,
                .k_norm = true,
                .kv = kv});
    }
    run_case({.q_norm = true, .kv = kv});
    run_case({.k_norm = true, .kv = kv});
  }
}

TEST(RopeKv, AttentionFactor) {
  AOTLLM_NEEDS_GPU();
  run_case({.attention_factor = 1.2079f});
  run_case({.rotary_half = 32, .kv = KvType::kFp8, .attention_factor = 0.5f});
}

TEST(RopeKv, RefusesACacheOfOtherHeads) {
  RopeKvArgs args;
  args.m = 1;
  args.num_heads = 4;
  args.num_kv_heads = 2;
  args.head_dim = 64;
  args.rotary_half = 32;
  EXPECT_THROW(rope_kv(args, Stream{}), Error);
}

}  // namespace
}  // namespace aotllm::cuda
