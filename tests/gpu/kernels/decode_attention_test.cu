#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/decode_schedule.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Case {
  std::string name;
  KvType type = KvType::kBf16;
  int head_dim = 128;
  int kv_heads = 2;
  int group = 4;
  int tokens_per_block = 64;
  std::vector<int> contexts;
  int split_tokens = 0;  ///< 0 = the library's choice
  int window = 0;
  float softcap = 0.0f;
};

/// Values and codes that a pool is filled from: drawing every value of a large pool would take longer than the test.
struct RandomValues {
  std::vector<float> values = random_normal(1 << 16);
  std::vector<Bf16> bf16 = to_bf16(values);
  std::vector<std::uint8_t> fp8 = to_fp8(values);
};
const RandomValues& random_values() {
  static const RandomValues values;
  return values;
}

/// A batch on the device with a copy on the host. Every element of the cache that no query may read is NaN.
struct Batch {
  Case c;
  int num_heads;
  int rows;
  std::vector<DecodeQuery> queries;
  std::vector<Bf16> q;
  std::vector<std::uint8_t> pool;
  std::size_t block_stride;
  int num_blocks = 0;
  int table_stride = 0;
  std::vector<std::int32_t> table;

  explicit Batch(const Case& spec) : c(spec), num_heads(c.kv_heads * c.group) {
    const int count = static_cast<int>(c.contexts.size());
    rows = count + 3;
    std::vector<int> row_order(static_cast<std::size_t>(rows)), sequence_order(static_cast<std::size_t>(count));
    std::iota(row_order.begin(), row_order.end(), 0);
    std::iota(sequence_order.begin(), sequence_order.end(), 0);
    std::shuffle(row_order.begin(), row_order.end(), random_engine());
    std::shuffle(sequence_order.begin(), sequence_order.end(), random_engine());
    const int longest = *std::max_element(c.contexts.begin(), c.contexts.end());
    table_stride = (longest + c.tokens_per_block - 1) / c.tokens_per_block + 2;
    q = random_bf16(static_cast<std::size_t>(rows) * num_heads * c.head_dim, 1.5f);

    num_blocks = 3;
    for (int context : c.contexts) num_blocks += (context + c.tokens_per_block - 1) / c.tokens_per_block;
    std::vector<int> free_blocks(static_cast<std::size_t>(num_blocks));
    std::iota(free_blocks.begin(), free_blocks.end(), 0);
    std::shuffle(free_blocks.begin(), free_blocks.end(), random_engine());
    const std::size_t payload = 2 * element_bytes(c.type) * c.kv_heads * c.tokens_per_block * c.head_dim;
    block_stride = payload + 256;
    pool.assign(block_stride * num_blocks, 0xFF);  // NaN of both types
    table.assign(static_cast<std::size_t>(count) * table_stride, free_blocks.back());
    free_blocks.pop_back();  // stays NaN

    int shared_sequence = -1;
    int shared_context = 0;
    for (int i = 0; i < count; ++i) {
      const int context = c.contexts[static_cast<std::size_t>(i)];
      const int sequence = sequence_order[static_cast<std::size_t>(i)];
      queries.push_back({row_order[static_cast<std::size_t>(i)], sequence, context});
      const int begin = c.window > 0 ? std::max(0, context - c.window) : 0;
      const bool shares = c.window == 0 && i % 2 == 1 && shared_sequence >= 0;
      for (int b = begin / c.tokens_per_block; b * c.tokens_per_block < context; ++b) {
        if (shares && (b + 1) * c.tokens_per_block <= std::min(shared_context, context)) {
          entry(sequence, b) = entry(shared_sequence, b);
          continue;
        }
        entry(sequence, b) = free_blocks.back();
        free_blocks.pop_back();
        const int from = std::max(begin - b * c.tokens_per_block, 0);
        const int to = std::min(context - b * c.tokens_per_block, c.tokens_per_block);
        for (int token = from; token < to; ++token) fill_token(entry(sequence, b), token);
      }
      if (context > shared_context && c.window == 0) {
        shared_sequence = sequence;
        shared_context = context;
      }
    }
  }

  std::int32_t& entry(int sequence, int block) {
    return table[static_cast<std::size_t>(sequence) * table_stride + block];
  }
  std::size_t offset(int block, int which, int kv_head, int token) const {
    const std::size_t row = (static_cast<std::size_t>(which) * c.kv_heads + kv_head) * c.tokens_per_block + token;
    return block * block_stride + row * c.head_dim * element_bytes(c.type);
  }
  void fill_token(int block, int token) {
    std::uniform_int_distribution<int> start(0, (1 << 16) - c.head_dim);
    for (int which = 0; which < 2; ++which) {
      for (int head = 0; head < c.kv_heads; ++head) {
        const int from = start(random_engine());
        const void* source = c.type == KvType::kBf16 ? static_cast<const void*>(random_values().bf16.data() + from)
                                                     : static_cast<const void*>(random_values().fp8.data() + from);
        std::memcpy(pool.data() + offset(block, which, head, token), source, c.head_dim * element_bytes(c.type));
      }
    }
  }
  void read_token(std::vector<double>& to, int sequence, int position, int which, int kv_head) const {
    const int block = table[static_cast<std::size_t>(sequence) * table_stride + position / c.tokens_per_block];
    const std::uint8_t* from = pool.data() + offset(block, which, kv_head, position % c.tokens_per_block);
    static const std::vector<double> fp8_values = [] {
      std::vector<double> values;
      for (int i = 0; i < 256; ++i) values.push_back(from_fp8(static_cast<std::uint8_t>(i)));
      return values;
    }();
    for (int d = 0; d < c.head_dim; ++d) {
      to[d] = c.type == KvType::kBf16 ? from_bf16(reinterpret_cast<const Bf16*>(from)[d]) : fp8_values[from[d]];
    }
  }

  /// [num_heads · head_dim] of one query, in float64.
  std::vector<double> reference(const DecodeQuery& query) const {
    const double scale = static_cast<float>(1.0 / std::sqrt(c.head_dim));
    const int begin = c.window > 0 ? std::max(0, query.context - c.window) : 0;
    std::vector<double> out(static_cast<std::size_t>(num_heads) * c.head_dim, 0.0);
    std::vector<double> row(static_cast<std::size_t>(c.head_dim));
    std::vector<double> queries_of_head(row.size() * c.group);
    for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      std::vector<std::vector<double>> weights(static_cast<std::size_t>(c.group));
      const std::size_t base =
          (static_cast<std::size_t>(query.row) * num_heads + static_cast<std::size_t>(kv_head) * c.group) * c.head_dim;
      for (std::size_t i = 0; i < queries_of_head.size(); ++i) queries_of_head[i] = from_bf16(q[base + i]);
      for (int position = begin; position < query.context; ++position) {
        read_token(row, query.sequence, position, 0, kv_head);
        for (int g = 0; g < c.group; ++g) {
          double score = 0.0;
          for (int d = 0; d < c.head_dim; ++d) score += queries_of_head[g * row.size() + d] * row[d];
          score *= scale;
          weights[g].push_back(c.softcap > 0.0f ? c.softcap * std::tanh(score / c.softcap) : score);
        }
      }
      for (auto& list : weights) {
        const double maximum = *std::max_element(list.begin(), list.end());
        double sum = 0.0;
        for (double& weight : list) sum += weight = std::exp(weight - maximum);
        for (double& weight : list) weight /= sum;
      }
      for (int position = begin; position < query.context; ++position) {
        read_token(row, query.sequence, position, 1, kv_head);
        for (int g = 0; g < c.group; ++g) {
          double* to = out.data() + (static_cast<std::size_t>(kv_head) * c.group + g) * c.head_dim;
          for (int d = 0; d < c.head_dim; ++d) to[d] += weights[g][position - begin] * row[d];
        }
      }
    }
    return out;
  }
};

/// Zeroed once, as an engine does, and used by all launches of this file.
DeviceArray<std::uint8_t>& workspace() {
  static DeviceArray<std::uint8_t> memory = [] {
    DeviceArray<std::uint8_t> fresh(std::size_t{64} << 20);
    fresh.fill(0);
    return fresh;
  }();
  return memory;
}

struct DeviceBatch {
  DeviceArray<Bf16> q;
  DeviceArray<std::uint8_t> pool;
  DeviceArray<std::int32_t> table;
  DeviceArray<DecodeQuery> queries;
  DeviceArray<Bf16> out;
  DecodeAttentionArgs args;

  explicit DeviceBatch(const Batch& b) : q(b.q), pool(b.pool), table(b.table), queries(b.queries), out(b.q.size()) {
    out.fill(0xFF);
    args.q = q.data();
    args.out = out.data();
    args.num_heads = b.num_heads;
    args.scale = static_cast<float>(1.0 / std::sqrt(b.c.head_dim));
    args.softcap = b.c.softcap;
    args.window = b.c.window;
    args.kv = {b.c.type,     pool.data(),          b.block_stride, b.num_blocks,  b.c.kv_heads,
               b.c.head_dim, b.c.tokens_per_block, table.data(),   b.table_stride};
    args.queries = queries.data();
    args.num_queries = static_cast<int>(b.queries.size());
    args.max_context = *std::max_element(b.c.contexts.begin(), b.c.contexts.end());
    args.split_tokens = b.c.split_tokens > 0 ? b.c.split_tokens
                                             : decode_split_tokens(args.num_queries, b.c.kv_heads, args.max_context,
                                                                   b.c.tokens_per_block);
    args.workspace = workspace().data();
    args.workspace_bytes = workspace().bytes();
  }
};

std::vector<std::uint16_t> bits(const std::vector<Bf16>& values) {
  std::vector<std::uint16_t> out(values.size());
  std::memcpy(out.data(), values.data(), out.size() * sizeof(std::uint16_t));
  return out;
}

void check_case(const Case& c, const Batch& batch, int sm) {
  DeviceBatch device(batch);
  decode_attention(device.args, Stream{nullptr, false, sm});
  const std::vector<Bf16> out = device.out.download();
  device.out.fill(0xFF);
  decode_attention(device.args, Stream{nullptr, false, sm});
  EXPECT_EQ(bits(out), bits(device.out.download())) << c.name << ": two runs differ";

  const std::size_t width = static_cast<std::size_t>(batch.num_heads) * c.head_dim;
  std::vector<bool> written(static_cast<std::size_t>(batch.rows), false);
  double worst = 0.0;
  std::string where;
  for (const DecodeQuery& query : batch.queries) {
    if (query.context == 0) continue;
    written[query.row] = true;
    const std::vector<double> want = batch.reference(query);
    for (int head = 0; head < batch.num_heads; ++head) {
      std::vector<double> got(static_cast<std::size_t>(c.head_dim));
      for (int d = 0; d < c.head_dim; ++d) got[d] = from_bf16(out[query.row * width + head * c.head_dim + d]);
      const std::span<const double> expected(want.data() + static_cast<std::size_t>(head) * c.head_dim, got.size());
      const double error = relative_error(got, expected);
      if (!(error <= worst)) {
        worst = error;
        const auto at = std::find_if(got.begin(), got.end(), [](double value) { return !std::isfinite(value); });
        where = "context " + std::to_string(query.context) + " head " + std::to_string(head) +
                (at != got.end() ? " first not finite: dim " + std::to_string(at - got.begin()) : "");
      }
    }
  }
  std::printf("%-44s sm %d split %5d  error %.2e  (%s)\n", c.name.c_str(), sm, device.args.split_tokens, worst,
              where.c_str());
  EXPECT_LT(worst, c.type == KvType::kBf16 ? 8e-3 : 5e-3) << c.name << ": " << where;
  const std::vector<std::uint16_t> raw = bits(out);
  for (int row = 0; row < batch.rows; ++row) {
    if (written[row]) continue;
    for (std::size_t i = 0; i < width; ++i) ASSERT_EQ(raw[row * width + i], 0xFFFF) << c.name << ": row " << row;
  }
}

/// With the kernels of SM90 and those of SM80.
void check_case(const Case& c) {
  const Batch batch(c);
  check_case(c, batch, 90);
  if (c.type == KvType::kBf16) check_case(c, batch, 80);
}

std::string type_name(KvType type) {
  return type == KvType::kBf16 ? "bf16" : "fp8";
}

TEST(DecodeAttention, HeadSizesAndGroups) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int head_dim : {64, 96, 128, 256}) {
      for (int group : {1, 3, 4, 7, 8, 16}) {
        // Ranges of 64: more items than CTAs, several ranges per query.
        const int split = group % 2 == 0 ? 64 : 0;
        const std::string name = " dim " + std::to_string(head_dim) + " group " + std::to_string(group);
        check_case({type_name(type) + name, type, head_dim, 3, group, 64, {1, 300, 0, 63, 64, 65, 777}, split});
      }
    }
  }
}

TEST(DecodeAttention, LargeGroups) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int group : {12, 17, 32, 71}) {
      check_case({type_name(type) + " group " + std::to_string(group), type, 64, 1, group, 32, {130, 5, 0, 500}, 64});
    }
  }
}

TEST(DecodeAttention, BlockSizesWindowsAndSoftcap) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (int tokens_per_block : {16, 32, 64, 128}) {
      for (int window : {0, 1, 100, 640}) {
        const int split = tokens_per_block % 96 == 32 ? 64 : window == 640 ? 192 : 0;  // 64 for blocks of 32 and 128
        const std::string name = " block " + std::to_string(tokens_per_block) + " window " + std::to_string(window);
        const int head_dim = window == 100 ? 96 : 128;
        const float softcap = window == 1 ? 0.0f : 20.0f;
        const std::vector<int> contexts = {1, 17, 0, 100, 101, 640, 1500};
        check_case({type_name(type) + name, type, head_dim, 3, 4, tokens_per_block, contexts, split, window, softcap});
      }
    }
  }
}

TEST(DecodeAttention, LongRaggedContexts) {
  AOTLLM_NEEDS_GPU();
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    check_case({type_name(type) + " long", type, 128, 2, 4, 64, {5000, 1, 4097, 2048, 0, 333, 4999, 64, 1023}, 0});
    check_case({type_name(type) + " long, split 64", type, 128, 1, 8, 16, {5000, 3, 2500, 0, 640}, 64});
    check_case({type_name(type) + " long, not split", type, 128, 1, 4, 128, {4500, 3, 2500}, 4544});
    check_case({type_name(type) + " one", type, 128, 8, 4, 64, {200}, 0});
  }
}

TEST(DecodeAttention, ManyQueries) {
  AOTLLM_NEEDS_GPU();
  std::vector<int> contexts;
  std::uniform_int_distribution<int> length(0, 150);
  for (int i = 0; i < 300; ++i) contexts.push_back(length(random_engine()));
  check_case({"bf16 300 queries", KvType::kBf16, 64, 2, 4, 16, contexts, 0});
  check_case({"fp8 300 queries, split 64", KvType::kFp8, 64, 2, 4, 16, contexts, 64});
}

TEST(DecodeAttention, LargeQueriesOverFp8Keys) {
  AOTLLM_NEEDS_GPU();
  Batch batch({"", KvType::kFp8, 128, 1, 4, 64, {90}, 0});
  for (Bf16& value : batch.q) value = __float2bfloat16_rn(__bfloat162float(value) * 1e20f);  // beyond f16
  DeviceBatch device(batch);
  device.args.scale = static_cast<float>(1e-20 / std::sqrt(128.0));
  decode_attention(device.args, Stream{});
  const std::vector<Bf16> out = device.out.download();
  for (Bf16& value : batch.q) value = __float2bfloat16_rn(__bfloat162float(value) * 1e-20f);
  const std::vector<double> want = batch.reference(batch.queries[0]);
  std::vector<double> got(want.size());
  for (std::size_t i = 0; i < got.size(); ++i) got[i] = from_bf16(out[batch.queries[0].row * got.size() + i]);
  EXPECT_LT(relative_error(got, want), 2e-2);  // the queries were rounded twice
}

TEST(DecodeAttention, BitsDoNotDependOnTheBatch) {
  AOTLLM_NEEDS_GPU();
  for (const auto& [type, sm] :
       {std::pair(KvType::kBf16, 90), std::pair(KvType::kFp8, 90), std::pair(KvType::kBf16, 80)}) {
    const Batch batch({"", type, 128, 2, 4, 64, {900, 1, 64, 0, 1777, 256, 257, 3000}, 256});
    DeviceBatch device(batch);
    const Stream stream{nullptr, false, sm};
    decode_attention(device.args, stream);
    const std::vector<std::uint16_t> together = bits(device.out.download());
    const std::size_t width = static_cast<std::size_t>(batch.num_heads) * 128;
    for (std::size_t i = 0; i < batch.queries.size(); ++i) {
      const DecodeQuery query = batch.queries[i];
      if (query.context == 0) continue;
      device.out.fill(0xFF);
      DecodeAttentionArgs args = device.args;
      args.queries = device.queries.data() + i;
      args.num_queries = 1;
      args.max_context = query.context + 700;
      decode_attention(args, stream);
      const std::vector<std::uint16_t> alone = bits(device.out.download());
      EXPECT_TRUE(std::equal(alone.begin() + query.row * width, alone.begin() + (query.row + 1) * width,
                             together.begin() + query.row * width))
          << type_name(type) << " sm " << sm << " context " << query.context;
    }
  }
}

TEST(DecodeAttention, GraphWithProgrammaticLaunches) {
  AOTLLM_NEEDS_GPU();
  const Batch batch({"", KvType::kBf16, 128, 2, 4, 64, {900, 1, 64, 0, 1777, 256}, 128});
  DeviceBatch device(batch);
  decode_attention(device.args, Stream{});
  const std::vector<std::uint16_t> want = bits(device.out.download());
  device.out.fill(0xFF);
  cudaStream_t handle;
  check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
  check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < 20; ++i) decode_attention(device.args, Stream{handle, true});
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamEndCapture(handle, &graph), "end of capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int i = 0; i < 5; ++i) check(cudaGraphLaunch(exec, handle), "launch");
  EXPECT_EQ(bits(device.out.download()), want);
  check(cudaGraphExecDestroy(exec), "destroy");
  check(cudaGraphDestroy(graph), "destroy");
  check(cudaStreamDestroy(handle), "destroy");
}

TEST(DecodeAttention, SplitTokensAreMultiplesThatCoverTheContext) {
  for (int queries : {1, 3, 64, 256, 5000}) {
    for (int context : {1, 200, 4096, 131072}) {
      for (int tokens_per_block : {16, 128}) {
        const int split = decode_split_tokens(queries, 8, context, tokens_per_block);
        EXPECT_GT(split, 0);
        EXPECT_EQ(split % 64, 0);
        EXPECT_EQ(split % tokens_per_block, 0);
        EXPECT_LT(split, context + 128);
      }
    }
  }
  EXPECT_EQ(decode_split_tokens(1, 8, 200, 64), 64);
  EXPECT_EQ(decode_split_tokens(4, 8, 256, 64), 64);
  EXPECT_EQ(decode_split_tokens(8, 8, 256, 64), 128);
  EXPECT_EQ(decode_split_tokens(16, 8, 256, 64), 128);
  EXPECT_EQ(decode_split_tokens(64, 8, 256, 64), 256);
  EXPECT_GE(decode_split_tokens(256, 8, 256, 64), 256);
  EXPECT_LT(decode_workspace_bytes(256, 32, 128, 131072, decode_split_tokens(256, 8, 131072, 64)),
            std::size_t{64} << 20);
}

TEST(DecodeSchedule, SharesHoldEachItemOnceInOrder) {
  auto& random = random_engine();
  for (int repetition = 0; repetition < 300; ++repetition) {
    DecodePlan plan;
    plan.num_queries = 1 + static_cast<int>(random() % 40);
    plan.head_tiles = 1 + static_cast<int>(random() % 9);
    plan.split_tokens = 64 * (1 + static_cast<int>(random() % 8));
    plan.tile_shift = 6 + static_cast<int>(random() % 2);
    plan.window = random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 700);
    plan.derive();
    std::vector<DecodeQuery> queries(static_cast<std::size_t>(plan.num_queries));
    std::vector<long long> starts = {0};
    std::vector<std::array<int, 3>> want, got;
    for (int i = 0; i < plan.num_queries; ++i) {
      queries[i].context = random() % 4 == 0 ? 0 : 1 + static_cast<int>(random() % 2000);
      const DecodeRanges ranges = decode_ranges(plan, queries[i].context);
      starts.push_back(starts.back() + static_cast<long long>(ranges.weight) * plan.head_tiles);
      for (int tile = 0; tile < plan.head_tiles; ++tile) {
        for (int range = 0; range < ranges.count; ++range) want.push_back({i, tile, range});
      }
    }
    const int blocks = 1 + static_cast<int>(random() % 300);
    for (int block = 0; block < blocks; ++block) {
      const DecodeShare share = decode_share(starts.back(), block, blocks);
      if (share.begin >= share.end) continue;
      const auto after = std::upper_bound(starts.begin(), starts.end(), share.begin);
      const int query = static_cast<int>(after - starts.begin()) - 1;
      DecodeCursor cursor;
      cursor.seek(plan, query, queries[query], starts[query], share.begin);
      while (cursor.settle(plan, queries.data()) && cursor.start < share.end) {
        got.push_back({cursor.query, cursor.head_tile, cursor.range});
        cursor.advance(plan);
      }
    }
    ASSERT_EQ(got, want);
  }
}

TEST(DecodeSchedule, RangeOfIsADivision) {
  for (int units = 1; units < 2200; units += units < 300 ? 1 : 37) {
    DecodePlan plan;
    plan.split_tokens = 64 * units;
    plan.derive();
    for (int position = 0; position < kDecodeMaxContext; position += 509) {
      ASSERT_EQ(range_of(plan, position), position / plan.split_tokens) << plan.split_tokens;
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
