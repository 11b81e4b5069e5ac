#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "bench/timing.h"
#include "device_array.h"

// Context attention in TFLOP/s, counting 4 · heads · head_dim for each visible pair of positions.
namespace aotllm::cuda {
namespace {

struct Shape {
  const char* name;
  int sequences;
  int length;
  int position = 0;
};

struct Model {
  int head_dim = 128;
  int num_heads = 32;
  int num_kv_heads = 8;
  KvType type = KvType::kBf16;
  float softcap = 0.0f;
  int window = 0;
  int tokens_per_block = 64;
};

/// Roughly normal values: the sum of uniform ones, from a hash of the index.
__global__ void fill_bf16(__nv_bfloat16* values, std::size_t size, std::uint32_t seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    std::uint64_t x = i * 0x9e3779b97f4a7c15ull + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>((x >> (16 * j)) & 0xffff) / 65536.0f - 0.5f;
    values[i] = __float2bfloat16(sum * 1.7320508f);
  }
}

__global__ void fill_fp8(std::uint8_t* values, std::size_t size) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u;
    values[i] = static_cast<std::uint8_t>(((x >> 8) & 0x80) | (0x28 + (x >> 16) % 0x14));  // magnitudes 0.25 … 1.5
  }
}

class Workload {
 public:
  Workload(const Shape& shape, const Model& model) : shape_(shape), model_(model) {
    const int context = shape.position + shape.length;
    const int blocks = (context + model.tokens_per_block - 1) / model.tokens_per_block;
    const int rows = shape.sequences * shape.length;
    std::vector<std::int32_t> table(static_cast<std::size_t>(shape.sequences * blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    std::vector<ContextTile> tiles;
    for (int i = (shape.length - 1) / kContextTileRows * kContextTileRows; i >= 0; i -= kContextTileRows) {
      for (int s = 0; s < shape.sequences; ++s) {
        tiles.push_back({s * shape.length + i, std::min(kContextTileRows, shape.length - i), s, shape.position + i});
      }
    }
    const std::size_t width = static_cast<std::size_t>(model.num_heads * model.head_dim);
    const std::size_t elements =
        2 * static_cast<std::size_t>(model.num_kv_heads * model.tokens_per_block * model.head_dim);
    const std::size_t stride = elements * element_bytes(model.type);
    q_ = DeviceArray<__nv_bfloat16>(static_cast<std::size_t>(rows) * width);
    out_ = DeviceArray<__nv_bfloat16>(q_.size());
    pool_ = DeviceArray<std::uint8_t>(stride * table.size());
    table_ = DeviceArray<std::int32_t>(table);
    tiles_ = DeviceArray<ContextTile>(tiles);
    fill_bf16<<<1024, 256>>>(q_.data(), q_.size(), 17);
    if (model.type == KvType::kBf16) {
      fill_bf16<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(pool_.data()), pool_.size() / 2, 99);
    } else {
      fill_fp8<<<1024, 256>>>(pool_.data(), pool_.size());
    }
    check(cudaDeviceSynchronize(), "fill");
    args.q = q_.data();
    args.out = out_.data();
    args.num_heads = model.num_heads;
    args.scale = 1.0f / std::sqrt(static_cast<float>(model.head_dim));
    args.softcap = model.softcap;
    args.window = model.window;
    args.kv = {model.type,
               pool_.data(),
               stride,
               static_cast<int>(table.size()),
               model.num_kv_heads,
               model.head_dim,
               model.tokens_per_block,
               table_.data(),
               blocks};
    args.tiles = tiles_.data();
    args.num_tiles = static_cast<int>(tiles.size());
    args.m = rows;
  }

  double flops() const {
    double pairs = 0.0;
    for (int i = 0; i < shape_.length; ++i) {
      const double seen = shape_.position + i + 0.5;
      pairs += model_.window > 0 ? std::min<double>(seen, model_.window) : seen;
    }
    return 4.0 * model_.num_heads * model_.head_dim * pairs * shape_.sequences;
  }

  ContextAttentionArgs args;

 private:
  Shape shape_;
  Model model_;
  DeviceArray<__nv_bfloat16> q_;
  DeviceArray<__nv_bfloat16> out_;
  DeviceArray<std::uint8_t> pool_;
  DeviceArray<std::int32_t> table_;
  DeviceArray<ContextTile> tiles_;
};

void print_row(const std::string& name, double seconds, double flops) {
  constexpr double kLimit = 785.0;
  std::printf("%-44s %9.1f us %7.1f TFLOP/s %5.1f %%\n", name.c_str(), seconds * 1e6, flops / seconds * 1e-12,
              100.0 * flops / seconds * 1e-12 / kLimit);
  std::fflush(stdout);
}

constexpr Shape kShapes[] = {{"1 x 2048", 1, 2048}, {"4 x 2048", 4, 2048},           {"4 x 4096", 4, 4096},
                             {"1 x 8192", 1, 8192}, {"2048 at 6144", 1, 2048, 6144}, {"256 x 128", 256, 128}};

void bench_model(int sm, const char* name, const Model& model, std::initializer_list<int> shapes) {
  if (sm < 90 && model.type != KvType::kBf16) return;
  for (int i : shapes) {
    const Shape& shape = kShapes[i];
    Workload workload(shape, model);
    const double seconds =
        time_in_graph(4, [&](int, const Stream& stream) { context_attention(workload.args, stream); }, 15, true, sm);
    print_row(std::string(name) + ", " + shape.name, seconds, workload.flops());
  }
}

void bench_all(int sm) {
  bench_model(sm, "bf16 32/8 x 128", Model{}, {0, 1, 2, 3, 4, 5});
  bench_model(sm, "bf16 32/8 x 128, blocks of 16", Model{.tokens_per_block = 16}, {3});
  bench_model(sm, "bf16 32/8 x 128, window 1024", Model{.window = 1024}, {3});
  bench_model(sm, "bf16 32/8 x 128, soft-cap 50", Model{.softcap = 50.0f}, {3});
  bench_model(sm, "fp8 32/8 x 128", Model{.type = KvType::kFp8}, {0, 3, 5});
  bench_model(sm, "bf16 32/8 x 64", Model{.head_dim = 64}, {0, 3});
  bench_model(sm, "fp8 32/8 x 64", Model{.head_dim = 64, .type = KvType::kFp8}, {3});
  bench_model(sm, "bf16 32/32 x 96", Model{.head_dim = 96, .num_kv_heads = 32}, {0, 3});
  bench_model(sm, "bf16 16/8 x 256", Model{.head_dim = 256, .num_heads = 16}, {0, 3});
  bench_model(sm, "fp8 16/8 x 256", Model{.head_dim = 256, .num_heads = 16, .type = KvType::kFp8}, {3});
}

}  // namespace
}  // namespace aotllm::cuda

int main(int argc, char** argv) {
  try {
    aotllm::cuda::bench_all(argc > 1 && std::string(argv[1]) == "sm80" ? 80 : 90);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
