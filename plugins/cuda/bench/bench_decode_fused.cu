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
#include "bench/random_data.cuh"
#include "bench/timing.h"
#include "device_array.h"
#include "elementwise/elementwise.h"

// Attention's part of a decode step where it stands: after a kernel that streams the QKV weights as a GEMM does (one
// CTA on each multiprocessor, most of its shared memory) and before another one. Printed is what the part adds to the
// chain of these: rope_kv and attention, or both in one kernel. 32/8 heads of 128, blocks of 64 tokens in random order.
namespace aotllm::cuda {
namespace {

constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kWidth = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kBlockTokens = 64;
constexpr int kMaxBatch = 256;
constexpr double kReadLimit = 4265e9;  // bytes per second
constexpr std::size_t kPoolBytes = std::size_t{6} << 30;
constexpr std::size_t kQkvBytes = std::size_t{kWidth} * 4096 * 2;
constexpr std::size_t kOutputBytes = std::size_t{kHeads} * kHeadDim * 4096 * 2;

/// What a thread takes of weights [begin, end), summed.
__device__ std::uint32_t stream_weights(const uint4* weights, std::size_t begin, std::size_t end) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::uint32_t sum = 0;
  for (std::size_t i = begin + std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < end; i += 16 * stride) {
    uint4 part[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) part[j] = i + j * stride < end ? __ldcs(weights + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < 16; ++j) sum += part[j].x ^ part[j].y ^ part[j].z ^ part[j].w;
  }
  return sum;
}

/// Streams weights, of which `early` come before the wait, as much as a ring in shared memory holds; reads `in` and
/// writes `out`.
__global__ void __launch_bounds__(512)
    stand_in(const uint4* weights, std::size_t early, std::size_t count, const uint4* in, uint4* out, int values) {
  cudaTriggerProgrammaticLaunchCompletion();
  const std::uint32_t before = stream_weights(weights, 0, early);
  cudaGridDependencySynchronize();
  const std::uint32_t sum = before ^ stream_weights(weights, early, count);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < values;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    uint4 value = __ldcg(in + i);
    if (sum == 0x12345) value.x ^= 1;
    out[i] = value;
  }
}

struct Shape {
  int batch;
  int context;
  bool ragged = false;  ///< contexts from half of it to one and a half
};

struct Memory {
  DeviceArray<std::uint8_t> pool{kPoolBytes};
  DeviceArray<std::uint8_t> weights{std::size_t{1} << 30};
  DeviceArray<__nv_bfloat16> source{std::size_t{kMaxBatch} * kWidth};
  DeviceArray<__nv_bfloat16> qkv{std::size_t{kMaxBatch} * kWidth};
  DeviceArray<__nv_bfloat16> q{std::size_t{kMaxBatch} * kHeads * kHeadDim};
  DeviceArray<__nv_bfloat16> out{std::size_t{kMaxBatch} * kHeads * kHeadDim};
  DeviceArray<__nv_bfloat16> after{std::size_t{kMaxBatch} * kHeads * kHeadDim};
  DeviceArray<std::uint8_t> workspace{std::size_t{128} << 20};
  DeviceArray<float> inv_freq{std::size_t{kHeadDim} / 2};

  Memory() {
    fill_random(reinterpret_cast<__nv_bfloat16*>(pool.data()), kPoolBytes / 2, 1.0f);
    fill_random(reinterpret_cast<__nv_bfloat16*>(weights.data()), weights.size() / 2, 1.0f);
    fill_random(source.data(), source.size(), 1.0f);
    fill_random(qkv.data(), qkv.size(), 1.0f);
    std::vector<float> values;
    for (int i = 0; i < kHeadDim / 2; ++i) values.push_back(std::pow(5e5f, -2.0f * i / kHeadDim));
    inv_freq.upload(values);
    workspace.fill(0);
  }
};

enum class Part { kNone, kTwo, kFused };

class Bench {
 public:
  Bench(Memory& memory, KvType type, const Shape& shape) : memory_(memory), type_(type), shape_(shape) {
    std::mt19937 engine(5);
    int longest = 0;
    for (int i = 0; i < shape.batch; ++i) {
      const auto spread = static_cast<unsigned>(shape.context);
      const int context = shape.ragged ? shape.context / 2 + static_cast<int>(engine() % spread) : shape.context;
      queries_.push_back({i, i, context});
      positions_.push_back(context - 1);
      sequences_.push_back(i);
      tokens_ += context;
      longest = std::max(longest, context);
    }
    const int per_sequence = (longest + kBlockTokens - 1) / kBlockTokens;
    blocks_ = per_sequence * shape.batch;
    std::vector<std::int32_t> table(static_cast<std::size_t>(blocks_));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(3));
    device_table_ = DeviceArray<std::int32_t>(table);
    device_queries_ = DeviceArray<DecodeQuery>(queries_);
    device_positions_ = DeviceArray<std::int32_t>(positions_);
    device_sequences_ = DeviceArray<std::int32_t>(sequences_);
    const std::size_t block_bytes = 2 * element_bytes(type) * kKvHeads * kBlockTokens * kHeadDim;
    layer_bytes_ = blocks_ * block_bytes;
    max_context_ = 256;
    while (max_context_ < longest) max_context_ *= 2;

    rope_.qkv = memory.qkv.data();
    rope_.q = memory.q.data();
    rope_.m = shape.batch;
    rope_.num_heads = kHeads;
    rope_.num_kv_heads = kKvHeads;
    rope_.head_dim = kHeadDim;
    rope_.inv_freq = memory.inv_freq.data();
    rope_.rotary_half = kHeadDim / 2;
    rope_.positions = device_positions_.data();
    rope_.sequences = device_sequences_.data();
    args_.q = memory.q.data();
    args_.out = memory.out.data();
    args_.num_heads = kHeads;
    args_.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    args_.kv = {type,     nullptr,      block_bytes,          blocks_,     kKvHeads,
                kHeadDim, kBlockTokens, device_table_.data(), per_sequence};
    args_.queries = device_queries_.data();
    args_.num_queries = shape.batch;
    args_.max_context = max_context_;
    args_.split_tokens = decode_split_tokens(shape.batch, kKvHeads, max_context_, kBlockTokens);
    args_.workspace = memory.workspace.data();
    args_.workspace_bytes = memory.workspace.bytes();
  }

  void set_split(int tokens) { args_.split_tokens = tokens; }

  double seconds(Part part, const DecodeTuning& tuning) {
    const int layers = static_cast<int>(std::clamp<std::size_t>(kPoolBytes / layer_bytes_, 1, 32));
    return time_in_graph(
        32,
        [&](int i, const Stream& stream) {
          weights(kQkvBytes, i, memory_.source, memory_.qkv, shape_.batch * kWidth / 8, stream);
          DecodeAttentionArgs args = args_;
          args.kv.base = memory_.pool.data() + static_cast<std::size_t>(i % layers) * layer_bytes_;
          RopeKvArgs rope = rope_;
          rope.kv = args.kv;
          if (part == Part::kTwo) rope_kv(rope, stream);
          if (part == Part::kFused) args.fused = &rope;
          if (part != Part::kNone) decode_attention(args, tuning, stream);
          weights(kOutputBytes, i, memory_.out, memory_.after, shape_.batch * kHeads * kHeadDim / 8, stream);
        },
        15);
  }

  void print(const char* name, const DecodeTuning& tuning) {
    const double none = seconds(Part::kNone, {});
    const double two = seconds(Part::kTwo, tuning) - none;
    const double fused = seconds(Part::kFused, tuning) - none;
    const double limit = 2.0 * element_bytes(type_) * kKvHeads * kHeadDim * tokens_ / kReadLimit;
    std::printf("%-4s %4d x %5d%s %-18s bytes %7.2f us: two kernels %7.2f us, fused %7.2f us (%5.1f%% of the limit)\n",
                type_ == KvType::kBf16 ? "bf16" : "fp8", shape_.batch, shape_.context, shape_.ragged ? "~" : " ", name,
                limit * 1e6, two * 1e6, fused * 1e6, limit / fused * 100);
    std::fflush(stdout);
  }

 private:
  void weights(std::size_t bytes, int i, const DeviceArray<__nv_bfloat16>& in, const DeviceArray<__nv_bfloat16>& out,
               int values, const Stream& stream) {
    const std::size_t places = memory_.weights.size() / kQkvBytes;
    const auto* from = reinterpret_cast<const uint4*>(memory_.weights.data() + i % places * kQkvBytes);
    constexpr std::size_t kShared = 160 * 1024;
    check(cudaFuncSetAttribute(stand_in, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared)),
          "shared memory");
    launch(stand_in, dim3(132), dim3(512), kShared, stream, from, std::min(bytes, 132 * kShared) / 16, bytes / 16,
           reinterpret_cast<const uint4*>(in.data()), reinterpret_cast<uint4*>(out.data()), values);
  }

  Memory& memory_;
  KvType type_;
  Shape shape_;
  std::vector<DecodeQuery> queries_;
  std::vector<std::int32_t> positions_, sequences_;
  double tokens_ = 0.0;
  int blocks_ = 0;
  int max_context_ = 0;
  std::size_t layer_bytes_ = 0;
  DeviceArray<std::int32_t> device_table_, device_positions_, device_sequences_;
  DeviceArray<DecodeQuery> device_queries_;
  RopeKvArgs rope_;
  DecodeAttentionArgs args_;
};

void bench_all(bool tune) {
  Memory memory;
  const std::vector<Shape> shapes = {{1, 200},        {8, 200},   {16, 200},        {32, 200},         {64, 185},
                                     {128, 170},      {256, 170}, {256, 300, true}, {256, 1070, true}, {1, 2000},
                                     {64, 512, true}, {1, 400},   {4, 200},         {1, 1000}};
  for (KvType type : {KvType::kBf16, KvType::kFp8}) {
    for (const Shape& shape : shapes) Bench(memory, type, shape).print("", {});
    if (!tune) continue;
    for (const Shape& shape : {Shape{64, 185}, Shape{256, 170}, Shape{256, 1070, true}}) {
      Bench bench(memory, type, shape);
      bench.print("2 stages", {.stages = 2});
      bench.print("box 16", {.box_tokens = 16});
    }
    for (int batch : {1, 2, 4, 8, 16, 24}) {
      for (int split : {64, 128, 256}) {
        Bench bench(memory, type, {batch, 200});
        bench.set_split(split);
        bench.print(("split " + std::to_string(split)).c_str(), {});
        if (split < 256) bench.print(("split " + std::to_string(split) + ", memory").c_str(), {.no_clusters = true});
      }
    }
    for (int split : {256, 512}) {
      Bench bench(memory, type, {256, 1070, true});
      bench.set_split(split);
      bench.print(("split " + std::to_string(split)).c_str(), {});
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  try {
    aotllm::cuda::bench_all(argc > 1 && std::strcmp(argv[1], "tune") == 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
