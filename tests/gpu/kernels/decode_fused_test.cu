#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "attention/attention.h"
#include "elementwise/elementwise.h"
#include "reference.h"

// A fused decode attention against rope_kv and decode attention one after the other, which have tests of their own: the
// same bits in the output and in every byte of the cache.
namespace aotllm::cuda {
namespace {

struct Case {
  std::string name;
  KvType type = KvType::kBf16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int tokens_per_block = 64;
  std::vector<int> contexts;  ///< 0 = a padding row
  int split_tokens = 0;       ///< 0 = the library's choice
  int window = 0;
  float softcap = 0.0f;
  int rotary_half = -1;  ///< -1 = all of the head
  bool q_norm = false;
  bool k_norm = false;
  float attention_factor = 1.0f;

  int heads() const { return kv_heads * (group + 2); }
  int half() const { return rotary_half < 0 ? head_dim / 2 : rotary_half; }
};

/// Random K and V where a query attends to, but for the newest position; NaN elsewhere.
struct Batch {
  std::vector<DecodeQuery> queries;
  std::vector<std::int32_t> positions;  ///< of rows
  std::vector<std::int32_t> sequences;
  std::vector<std::int32_t> table;
  int table_stride = 0;
  int num_blocks = 0;
  std::size_t block_stride = 0;
  std::vector<std::uint8_t> pool;

  explicit Batch(const Case& c) {
    const int count = static_cast<int>(c.contexts.size());
    std::vector<int> rows(c.contexts.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), random_engine());
    const int longest = *std::max_element(c.contexts.begin(), c.contexts.end());
    table_stride = longest / c.tokens_per_block + 2;
    num_blocks = 2;
    for (int context : c.contexts) num_blocks += (context + c.tokens_per_block - 1) / c.tokens_per_block;
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(num_blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random_engine());
    block_stride = 2 * element_bytes(c.type) * c.kv_heads * c.tokens_per_block * c.head_dim + 256;
    pool.assign(block_stride * num_blocks, 0xFF);
    table.assign(static_cast<std::size_t>(count) * table_stride, blocks.back());
    blocks.pop_back();  // stays NaN
    positions.assign(c.contexts.size(), 0);
    sequences.assign(c.contexts.size(), -1);
    for (int i = 0; i < count; ++i) {
      const int context = c.contexts[static_cast<std::size_t>(i)];
      queries.push_back(context == 0 ? DecodeQuery{} : DecodeQuery{rows[i], i, context});
      if (context == 0) continue;
      positions[rows[i]] = context - 1;
      sequences[rows[i]] = i;
      const int begin = c.window > 0 ? std::max(0, context - c.window) : 0;
      for (int b = begin / c.tokens_per_block; b * c.tokens_per_block < context; ++b) {
        table[static_cast<std::size_t>(i) * table_stride + b] = blocks.back();
        const int to = std::min(context - 1 - b * c.tokens_per_block, c.tokens_per_block);
        for (int token = std::max(begin - b * c.tokens_per_block, 0); token < to; ++token) {
          fill_token(c, blocks.back(), token);
        }
        blocks.pop_back();
      }
    }
  }

  void fill_token(const Case& c, int block, int token) {
    static const std::vector<float> values = random_normal(1 << 16);
    static const std::vector<Bf16> bf16 = to_bf16(values);
    static const std::vector<std::uint8_t> fp8 = to_fp8(values);
    std::uniform_int_distribution<int> start(0, (1 << 16) - c.head_dim);
    for (int piece = 0; piece < 2 * c.kv_heads; ++piece) {
      const int from = start(random_engine());
      const void* source = c.type == KvType::kBf16 ? static_cast<const void*>(bf16.data() + from) : fp8.data() + from;
      const std::size_t row = (static_cast<std::size_t>(piece) * c.tokens_per_block + token) * c.head_dim;
      std::memcpy(pool.data() + block * block_stride + row * element_bytes(c.type), source,
                  c.head_dim * element_bytes(c.type));
    }
  }
};

struct DeviceBatch {
  DeviceArray<Bf16> qkv;
  DeviceArray<float> norm, inv_freq;
  DeviceArray<std::int32_t> table, positions, sequences;
  DeviceArray<DecodeQuery> queries;
  DeviceArray<std::uint8_t> pool, workspace;
  DeviceArray<Bf16> q, out;
  RopeKvArgs rope;
  DecodeAttentionArgs args;

  DeviceBatch(const Case& c, const Batch& b)
      : qkv(random_bf16(b.positions.size() * c.heads() * c.head_dim, 1.5f)),
        norm(random_normal(2 * c.head_dim)),
        inv_freq(frequencies(c.half())),
        table(b.table),
        positions(b.positions),
        sequences(b.sequences),
        queries(b.queries),
        pool(b.pool),
        workspace(std::size_t{64} << 20),
        q(b.positions.size() * c.kv_heads * c.group * c.head_dim),
        out(q.size()) {
    workspace.fill(0);
    rope.qkv = qkv.data();
    rope.m = static_cast<int>(b.positions.size());
    rope.num_heads = args.num_heads = c.kv_heads * c.group;
    rope.num_kv_heads = c.kv_heads;
    rope.head_dim = c.head_dim;
    if (c.q_norm) rope.q_norm = norm.data();
    if (c.k_norm) rope.k_norm = norm.data() + c.head_dim;
    rope.qk_norm_eps = 1e-6f;
    rope.inv_freq = inv_freq.data();
    rope.rotary_half = c.half();
    rope.attention_factor = c.attention_factor;
    args.out = out.data();
    args.scale = static_cast<float>(1.0 / std::sqrt(c.head_dim));
    args.softcap = c.softcap;
    args.window = c.window;
    args.kv = {c.type,     pool.data(),        b.block_stride, b.num_blocks,  c.kv_heads,
               c.head_dim, c.tokens_per_block, table.data(),   b.table_stride};
    args.queries = queries.data();
    args.num_queries = static_cast<int>(b.queries.size());
    args.max_context = *std::max_element(c.contexts.begin(), c.contexts.end());
    args.split_tokens = c.split_tokens > 0
                            ? c.split_tokens
                            : decode_split_tokens(args.num_queries, c.kv_heads, args.max_context, c.tokens_per_block);
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.bytes();
  }

  static std::vector<float> frequencies(int half) {
    std::vector<float> values;
    for (int i = 0; i < half; ++i) values.push_back(static_cast<float>(std::pow(5e5, -1.0 * i / half)));
    return values;
  }

  void launch_fused(const Stream& stream) {
    DecodeAttentionArgs call = args;
    call.fused = &rope;
    decode_attention(call, stream);
  }
  void launch_both(const Stream& stream) {
    RopeKvArgs first = rope;
    first.q = q.data();
    first.positions = positions.data();
    first.sequences = sequences.data();
    first.kv = args.kv;
    rope_kv(first, stream);
    DecodeAttentionArgs second = args;
    second.q = q.data();
    decode_attention(second, stream);
  }
  std::vector<std::uint16_t> out_bits() const {
    const std::vector<Bf16> values = out.download();
    std::vector<std::uint16_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), bits.size() * sizeof(bits[0]));
    return bits;
  }
};

template <class T>
std::string difference(const std::vector<T>& got, const std::vector<T>& want) {
  const auto at = std::mismatch(got.begin(), got.end(), want.begin());
  if (at.first == got.end()) return "";
  return "index " + std::to_string(at.first - got.begin()) + " is " + std::to_string(*at.first) + ", should be " +
         std::to_string(*at.second);
}

void check_case(const Case& c) {
  const Batch batch(c);
  DeviceBatch device(c, batch);
  device.out.fill(0xFF);
  device.launch_both(Stream{});
  const std::vector<std::uint16_t> want = device.out_bits();
  const std::vector<std::uint8_t> want_pool = device.pool.download();
  for (int run = 0; run < 2; ++run) {
    device.pool.upload(batch.pool);
    device.out.fill(0xFF);
    device.q.fill(0xFF);
    device.launch_fused(Stream{});
    EXPECT_EQ(difference(device.out_bits(), want), "") << c.name << ": out, run " << run;
    EXPECT_EQ(difference(device.pool.download(), want_pool), "") << c.name << ": cache, run " << run;
  }
  const std::size_t width = want.size() / batch.positions.size();
  for (std::size_t i = 0; i < want.size(); ++i) {
    const bool is_nan = (want[i] & 0x7F80) == 0x7F80;
    ASSERT_EQ(is_nan, batch.sequences[i / width] < 0) << c.name << ": row " << i / width;
  }
}

std::string type_name(KvType type) {
  return type == KvType::kBf16 ? "bf16" : "fp8";
}

TEST(DecodeFused, HeadSizesAndGroups) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int head_dim : {64, 96, 128, 256}) {
      for (int group : {1, 2, 3, 4, 5, 7, 8, 16, 20}) {
        const std::string name = " dim " + std::to_string(head_dim) + " group " + std::to_string(group);
        check_case({.name = type_name(type) + name,
                    .type = type,
                    .head_dim = head_dim,
                    .kv_heads = 3,
                    .group = group,
                    .contexts = {1, 300, 0, 63, 64, 65, 777, 128, 129, 2},
                    .split_tokens = group % 2 == 0 ? 64 : 0});
      }
    }
  }
}

TEST(DecodeFused, BlockSizesWindowsAndSoftcap) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int tokens_per_block : {16, 32, 64, 128}) {
      for (int window : {0, 1, 16, 100, 640}) {
        check_case({.name = type_name(type) + " block " + std::to_string(tokens_per_block) + " window " +
                            std::to_string(window),
                    .type = type,
                    .head_dim = window == 100 ? 96 : 128,
                    .tokens_per_block = tokens_per_block,
                    .contexts = {1, 16, 17, 0, 32, 33, 100, 101, 128, 129, 640, 641, 1500},
                    .split_tokens = tokens_per_block == 32 ? 64 : 0,
                    .window = window,
                    .softcap = window == 1 ? 0.0f : 20.0f});
      }
    }
  }
}

TEST(DecodeFused, NormsAndPartialRotary) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int head_dim : {64, 96, 128, 256}) {
      for (int half : {0, 8, 16, 32, head_dim / 2}) {
        for (int norms = 0; norms < 4; ++norms) {
          const std::string name =
              " dim " + std::to_string(head_dim) + " half " + std::to_string(half) + " norms " + std::to_string(norms);
          check_case({.name = type_name(type) + name,
                      .type = type,
                      .head_dim = head_dim,
                      .contexts = {5, 0, 200, 64},
                      .rotary_half = half,
                      .q_norm = norms % 2 == 1,
                      .k_norm = norms / 2 == 1,
                      .attention_factor = half == 32 ? 1.2079f : 1.0f});
        }
      }
    }
  }
}

TEST(DecodeFused, ManyRaggedQueries) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int longest : {150, 600}) {
      std::vector<int> contexts;
      std::uniform_int_distribution<int> length(0, longest);
      for (int i = 0; i < 300; ++i) contexts.push_back(length(random_engine()));
      for (int split : {0, 64}) {
        check_case({.name = type_name(type) + " up to " + std::to_string(longest),
                    .type = type,
                    .tokens_per_block = 16,
                    .contexts = contexts,
                    .split_tokens = split});
      }
    }
    check_case({.name = type_name(type) + " one", .type = type, .kv_heads = 8, .contexts = {200}});
    check_case({.name = type_name(type) + " long", .type = type, .contexts = {5000, 1, 4097, 0, 40000}});
  }
}

/// Ends late, having let its successor start early.
__global__ void late_copy(const uint4* from, uint4* to, int count, unsigned nanoseconds) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  for (unsigned waited = 0; waited < nanoseconds; waited += 1000) __nanosleep(1000);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    to[i] = from[i];
  }
}

TEST(DecodeFused, WaitsForWhatItsPredecessorWrites) {
  AOTLLM_NEEDS_GPU();
  for (int queries : {3, 200}) {
    Case c{.name = "chain", .kv_heads = 4, .contexts = {}};
    for (int i = 0; i < queries; ++i) c.contexts.push_back(1 + (i * 37 + 199) % 400);
    const Batch batch(c);
    DeviceBatch device(c, batch);
    device.launch_both(Stream{});
    const std::vector<std::uint16_t> want = device.out_bits();
    const std::vector<std::uint8_t> want_pool = device.pool.download();
    device.pool.upload(batch.pool);
    device.out.fill(0xFF);
    const DeviceArray<Bf16> source(device.qkv.download());
    const DeviceArray<Bf16> poison(random_bf16(source.size()));
    cudaStream_t handle;
    check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
    check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
    const int count = static_cast<int>(source.size() / 8);
    const auto copy = [&](const DeviceArray<Bf16>& from, unsigned nanoseconds) {
      launch(late_copy, dim3(8), dim3(256), 0, Stream{handle, true}, reinterpret_cast<const uint4*>(from.data()),
             reinterpret_cast<uint4*>(device.qkv.data()), count, nanoseconds);
    };
    for (int i = 0; i < 10; ++i) {
      copy(poison, 0);
      copy(source, 20000);
      device.launch_fused(Stream{handle, true});
    }
    copy(poison, 0);  // may not be before the last attention has read
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamEndCapture(handle, &graph), "end of capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(exec, handle), "launch");
    EXPECT_EQ(difference(device.out_bits(), want), "") << queries;
    EXPECT_EQ(difference(device.pool.download(), want_pool), "") << queries;
    check(cudaGraphExecDestroy(exec), "destroy");
    check(cudaGraphDestroy(graph), "destroy");
    check(cudaStreamDestroy(handle), "destroy");
  }
}

TEST(DecodeFused, RefusesWhatItCannotDealOut) {
  RopeKvArgs rope;
  rope.head_dim = 128;
  rope.rotary_half = 20;
  EXPECT_FALSE(decode_can_fuse(rope));
  rope.rotary_half = 32;
  EXPECT_TRUE(decode_can_fuse(rope));
  rope.num_kv_heads = 8;
  EXPECT_TRUE(decode_prefers_fused(rope, KvType::kBf16, 1, 256, 64));
  EXPECT_TRUE(decode_prefers_fused(rope, KvType::kBf16, 256, 256, 64));
  EXPECT_FALSE(decode_prefers_fused(rope, KvType::kFp8, 256, 256, 64));    // consumers are the bottleneck
  EXPECT_FALSE(decode_prefers_fused(rope, KvType::kBf16, 256, 2048, 64));  // several ranges, many of a CTA
  DecodeAttentionArgs args;
  args.num_heads = 4;
  args.num_queries = args.max_context = 1;
  args.split_tokens = 64;
  args.kv.num_kv_heads = 2;
  args.kv.head_dim = 128;
  args.kv.tokens_per_block = 64;
  rope.num_heads = 4;
  rope.num_kv_heads = 4;
  args.fused = &rope;
  EXPECT_THROW(decode_attention(args, Stream{}), Error);
}

}  // namespace
}  // namespace aotllm::cuda
