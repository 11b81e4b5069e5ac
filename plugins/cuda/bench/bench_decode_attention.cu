#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/decode_launch.h"
#include "bench/timing.h"
#include "device_array.h"

// Decode attention of one layer, 32/8 heads of 128, blocks of 64 tokens in random order. Calls rotate over several
// layers' caches, so that K and V come from memory. `bench_decode_attention tune` also times choices of the kernel.
namespace aotllm::cuda {
namespace {

constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kBlockTokens = 64;
constexpr double kReadLimit = 4265e9;  // bytes per second
constexpr std::size_t kPoolBytes = std::size_t{5} << 30;

struct Shape {
  int batch;
  int context;
  int max_context = 0;  ///< of the graph; 0 = context
  bool ragged = false;  ///< contexts between 1 and twice the mean
};

/// Memory of all shapes: random bytes whose bf16 and E4M3 readings are ordinary numbers.
struct Memory {
  DeviceArray<std::uint8_t> pool{kPoolBytes};
  DeviceArray<__nv_bfloat16> q{std::size_t{256} * kHeads * kHeadDim};
  DeviceArray<__nv_bfloat16> out{std::size_t{256} * kHeads * kHeadDim};
  DeviceArray<std::uint8_t> workspace{std::size_t{128} << 20};

  Memory() {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    std::vector<__nv_bfloat16> values(std::size_t{1} << 22);
    for (auto& value : values) value = __float2bfloat16_rn(normal(engine));
    check(cudaMemcpy(q.data(), values.data(), q.bytes(), cudaMemcpyHostToDevice), "copy");
    const std::size_t part = values.size() * sizeof(values[0]);
    check(cudaMemcpy(pool.data(), values.data(), part, cudaMemcpyHostToDevice), "copy");
    for (std::size_t at = part; at < kPoolBytes; at += part) {
      check(cudaMemcpy(pool.data() + at, pool.data(), std::min(part, kPoolBytes - at), cudaMemcpyDeviceToDevice),
            "copy");
    }
    workspace.fill(0);
  }
};

void bench(Memory& memory, KvType type, const Shape& shape, int split_tokens, const DecodeTuning& tuning, int sm = 90) {
  const std::size_t block_bytes = 2 * element_bytes(type) * kKvHeads * kBlockTokens * kHeadDim;
  std::mt19937 engine(5);
  std::vector<DecodeQuery> queries;
  double tokens = 0.0;
  int longest = 0;
  for (int i = 0; i < shape.batch; ++i) {
    const int context =
        shape.ragged ? 1 + static_cast<int>(engine() % static_cast<unsigned>(2 * shape.context)) : shape.context;
    queries.push_back({i, i, context});
    tokens += context;
    longest = std::max(longest, context);
  }
  const int blocks_per_sequence = (longest + kBlockTokens - 1) / kBlockTokens;
  const int blocks = blocks_per_sequence * shape.batch;
  const std::size_t layer_bytes = blocks * block_bytes;
  const int layers = static_cast<int>(std::clamp<std::size_t>(kPoolBytes / layer_bytes, 1, 96));
  std::vector<std::int32_t> table(static_cast<std::size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(3));
  const DeviceArray<std::int32_t> device_table(table);
  const DeviceArray<DecodeQuery> device_queries(queries);

  DecodeAttentionArgs args;
  args.q = memory.q.data();
  args.out = memory.out.data();
  args.num_heads = kHeads;
  args.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  args.kv = {
      type, nullptr, block_bytes, blocks, kKvHeads, kHeadDim, kBlockTokens, device_table.data(), blocks_per_sequence};
  args.queries = device_queries.data();
  args.num_queries = shape.batch;
  args.max_context = shape.max_context > 0 ? shape.max_context : longest;
  args.split_tokens =
      split_tokens > 0 ? split_tokens : decode_split_tokens(shape.batch, kKvHeads, args.max_context, kBlockTokens);
  args.workspace = memory.workspace.data();
  args.workspace_bytes = memory.workspace.bytes();
  const double seconds = time_in_graph(
      std::max(layers, 4),
      [&](int i, const Stream& stream) {
        DecodeAttentionArgs call = args;
        call.kv.base = memory.pool.data() + static_cast<std::size_t>(i % layers) * layer_bytes;
        sm < 90 ? decode_attention(call, stream) : decode_attention(call, tuning, stream);
      },
      9, true, sm);
  const double bytes = 2.0 * element_bytes(type) * kKvHeads * kHeadDim * tokens;
  std::printf("%-4s %4d x %5d%s max %6d split %5d box %2d stages %d blocks %d %9.2f us %7.0f GB/s %5.1f%%\n",
              type == KvType::kBf16 ? "bf16" : "fp8", shape.batch, shape.context, shape.ragged ? "~" : " ",
              args.max_context, args.split_tokens, tuning.box_tokens, tuning.stages, tuning.blocks_per_sm,
              seconds * 1e6, bytes / seconds * 1e-9, bytes / seconds / kReadLimit * 100);
}

void bench_all(bool tune, int sm) {
  Memory memory;
  const std::vector<Shape> shapes = {{1, 200},
                                     {8, 200},
                                     {1, 8192},
                                     {8, 8192},
                                     {64, 1024},
                                     {64, 4096},
                                     {256, 256},
                                     {256, 1024},
                                     {1, 200, 8192},
                                     {64, 1000, 8192},
                                     {64, 2000, 8192, true},
                                     {256, 500, 0, true}};
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    if (sm < 90 && type != KvType::kBf16) continue;
    for (const Shape& shape : shapes) bench(memory, type, shape, 0, {}, sm);
    if (!tune) continue;
    for (int split : {256, 512, 2048, 4096}) bench(memory, type, {64, 4096}, split, {});
    for (int split : {64, 128, 512}) bench(memory, type, {1, 8192}, split, {});
    for (int split : {64, 128, 256}) bench(memory, type, {1, 2048}, split, {});
    for (int split : {64, 128, 256, 512}) bench(memory, type, {4, 1024}, split, {});
    for (int split : {256, 1024, 2048}) bench(memory, type, {8, 8192}, split, {});
    for (int split : {512, 1536, 2048, 4096}) bench(memory, type, {64, 2000, 8192, true}, split, {});
    for (int split : {256, 512, 1024}) bench(memory, type, {256, 500, 0, true}, split, {});
    bench(memory, type, {1, 200}, 64, {});
    bench(memory, type, {8, 200}, 64, {});
    bench(memory, type, {256, 256}, 128, {});
    bench(memory, type, {64, 4096}, 0, {0, 2, 0});
    bench(memory, type, {64, 4096}, 0, {16, 0, 0});
    bench(memory, type, {256, 256}, 0, {0, 0, 1});
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  try {
    const auto has = [&](const char* word) { return argc > 1 && std::strcmp(argv[1], word) == 0; };
    aotllm::cuda::bench_all(has("tune"), has("sm80") ? 80 : 90);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
