#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "reference.h"

// Batches of queries over paged K and V for decode attention, with the answers in float64.
namespace aotllm::cuda {

struct DecodeCase {
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
struct RandomKv {
  std::vector<float> values = random_normal(1 << 16);
  std::vector<Bf16> bf16 = to_bf16(values);
  std::vector<std::uint8_t> fp8 = to_fp8(values);
};
inline const RandomKv& random_kv() {
  static const RandomKv values;
  return values;
}

/// A batch on the device with a copy on the host. Every element of the cache that no query may read is NaN.
struct DecodeBatch {
  DecodeCase c;
  int num_heads;
  int rows;
  std::vector<DecodeQuery> queries;
  std::vector<Bf16> q;
  std::vector<std::uint8_t> pool;
  std::size_t block_stride;
  int num_blocks = 0;
  int table_stride = 0;
  std::vector<std::int32_t> table;

  explicit DecodeBatch(const DecodeCase& spec) : c(spec), num_heads(c.kv_heads * c.group) {
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
        const void* source = c.type == KvType::kBf16 ? static_cast<const void*>(random_kv().bf16.data() + from)
                                                     : static_cast<const void*>(random_kv().fp8.data() + from);
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

/// Zeroed once, as an engine does, and used by all launches.
inline DeviceArray<std::uint8_t>& decode_workspace() {
  static DeviceArray<std::uint8_t> memory = [] {
    DeviceArray<std::uint8_t> fresh(std::size_t{64} << 20);
    fresh.fill(0);
    return fresh;
  }();
  return memory;
}

struct DeviceDecodeBatch {
  DeviceArray<Bf16> q;
  DeviceArray<std::uint8_t> pool;
  DeviceArray<std::int32_t> table;
  DeviceArray<DecodeQuery> queries;
  DeviceArray<Bf16> out;
  DecodeAttentionArgs args;

  explicit DeviceDecodeBatch(const DecodeBatch& b)
      : q(b.q), pool(b.pool), table(b.table), queries(b.queries), out(b.q.size()) {
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
    args.workspace = decode_workspace().data();
    args.workspace_bytes = decode_workspace().bytes();
  }
};

inline std::vector<std::uint16_t> bits(const std::vector<Bf16>& values) {
  std::vector<std::uint16_t> out(values.size());
  std::memcpy(out.data(), values.data(), out.size() * sizeof(std::uint16_t));
  return out;
}

}  // namespace aotllm::cuda
