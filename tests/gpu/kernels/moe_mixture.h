#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "int_matrix.h"
#include "moe/moe.h"
#include "reference.h"

// A mixture of experts with random weights on the device, and its values for a reference.
namespace aotllm::cuda::moe_test {

struct Case {
  int m = 1;
  int num_experts = 8;
  int top_k = 2;
  int hidden = 128;
  int intermediate = 96;
  bool fp8 = false;
  std::optional<IntFormat> integers;  // of the experts, instead of bf16 or FP8
  bool normalize = true;
  Activation activation = Activation::kSilu;
  int tokens = 0;        // of a tile; 0: what is chosen
  int favourite = -1;    // an expert that every row takes
  int avoided_from = 0;  // > 0: experts from here on get no row
};

inline std::string describe(const Case& c) {
  return "m " + std::to_string(c.m) + " experts " + std::to_string(c.num_experts) + " top " + std::to_string(c.top_k) +
         " hidden " + std::to_string(c.hidden) + " intermediate " + std::to_string(c.intermediate) +
         (c.integers ? " integers " + std::to_string(static_cast<int>(*c.integers))
          : c.fp8    ? " fp8"
                     : " bf16") +
         " tokens " + std::to_string(c.tokens) + " favourite " + std::to_string(c.favourite) + " avoided from " +
         std::to_string(c.avoided_from);
}

/// A matrix on the device, and its exact values.
struct Matrix {
  std::vector<float> values, scales;
  DeviceArray<std::uint8_t> data;
  DeviceArray<float> scales_data;
  std::shared_ptr<const IntMatrix> integers;

  Matrix() = default;
  Matrix(IntFormat format, std::size_t rows, std::size_t columns)
      : integers(std::make_shared<IntMatrix>(format, static_cast<int>(rows), static_cast<int>(columns))) {
    for (std::size_t row = 0; row < rows; ++row) {
      const float* from = integers->row(static_cast<int>(row));
      values.insert(values.end(), from, from + columns);
    }
  }
  Matrix(std::size_t rows, std::size_t columns, bool fp8, float sigma) {
    std::vector<float> drawn = random_normal(rows * columns, fp8 ? 16.0f : sigma);
    values.resize(drawn.size());
    if (fp8) {
      const auto codes = to_fp8(drawn);
      for (std::size_t i = 0; i < codes.size(); ++i) values[i] = static_cast<float>(from_fp8(codes[i]));
      data = DeviceArray<std::uint8_t>(codes);
      std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
      for (std::size_t i = 0; i < rows; ++i) scales.push_back(sigma / 16.0f * uniform(random_engine()));
      scales_data = DeviceArray<float>(scales);
      for (std::size_t i = 0; i < codes.size(); ++i) values[i] *= scales[i / columns];
    } else {
      const auto rounded = to_bf16(drawn);
      for (std::size_t i = 0; i < rounded.size(); ++i) values[i] = static_cast<float>(from_bf16(rounded[i]));
      std::vector<std::uint8_t> bytes(rounded.size() * 2);
      std::memcpy(bytes.data(), rounded.data(), bytes.size());
      data = DeviceArray<std::uint8_t>(bytes);
    }
  }
};

inline double dot(const float* a, const float* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

inline double activate(double x, Activation activation) {
  if (activation == Activation::kSilu) return x / (1.0 + std::exp(-x));
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

/// Everything on the device; outputs hold poison.
struct Mixture {
  Case c;
  int pairs;
  std::vector<Bf16> x;
  std::vector<float> router;
  Matrix codes, gate_up, down, inner;  // `codes`: x as experts read it; `inner`: what `down` reads, of places
  DeviceArray<Bf16> x_data, h, y, residual, out;
  DeviceArray<float> router_data, weights, row_scales, logits;
  DeviceArray<std::int32_t> experts, places, rows, counters;
  DeviceArray<MoeTile> tiles;
  DeviceArray<std::uint32_t> members;
  MoeRouting routing;
  const std::int32_t* sequences = nullptr;

  explicit Mixture(const Case& from) : c(from), pairs(from.m * from.top_k) {
    if (c.tokens == 0) c.tokens = moe_tile_tokens(c.m, c.num_experts, c.top_k, type());
    const auto e = static_cast<std::size_t>(c.num_experts);
    const auto width = static_cast<std::size_t>(c.hidden);
    const auto n_inner = static_cast<std::size_t>(c.intermediate);
    const auto n_pairs = static_cast<std::size_t>(pairs);
    x = random_bf16(c.m * width);
    for (int row = 0; row < c.m; ++row) x[row * width] = __float2bfloat16_rn(1.0f);
    router = random_normal(e * width, 1.0f / std::sqrt(static_cast<float>(width)));
    for (int expert = 0; expert < c.num_experts; ++expert) {
      if (expert == c.favourite) router[expert * width] = 20.0f;
      if (c.avoided_from > 0 && expert >= c.avoided_from) router[expert * width] = -40.0f;
    }
    codes = Matrix(c.m, width, c.fp8, 1.0f);
    gate_up = weights_matrix(e * 2 * n_inner, width);
    down = weights_matrix(e * width, n_inner);
    inner = Matrix(n_pairs, n_inner, c.fp8, 1.0f);
    x_data = DeviceArray<Bf16>(x);
    router_data = DeviceArray<float>(router);
    residual = DeviceArray<Bf16>(random_bf16(c.m * width));
    h = poisoned<Bf16>((n_pairs + 1) * n_inner);
    y = poisoned<Bf16>((n_pairs + 1) * width);
    out = poisoned<Bf16>((c.m + 1) * width);
    weights = poisoned<float>(n_pairs + 1);
    row_scales = poisoned<float>(n_pairs + 1);
    logits = poisoned<float>(c.m * e + 1);
    experts = poisoned<std::int32_t>(n_pairs + 1);
    places = poisoned<std::int32_t>(n_pairs + 1);
    rows = poisoned<std::int32_t>(n_pairs + 1);
    tiles = poisoned<MoeTile>(moe_max_tiles(c.m, c.num_experts, c.top_k, c.tokens) + 1);
    counters = DeviceArray<std::int32_t>(2);
    members = poisoned<std::uint32_t>(moe_members(c.m, c.num_experts) + 1);
    counters.fill(0);
    routing = {experts.data(),    weights.data(), places.data(),  rows.data(),
               row_scales.data(), tiles.data(),   members.data(), counters.data()};
  }

  template <class T>
  static DeviceArray<T> poisoned(std::size_t size) {
    DeviceArray<T> array(size);
    array.fill(0xFF);
    return array;
  }

  void route(const Stream& stream = {}) const {
    MoeRouteArgs args;
    args.x = x_data.data();
    args.x_scales = c.fp8 ? codes.scales_data.data() : nullptr;
    args.router = router_data.data();
    args.m = c.m;
    args.width = c.hidden;
    args.num_experts = c.num_experts;
    args.top_k = c.top_k;
    args.normalize = c.normalize;
    args.tokens = c.tokens;
    args.sequences = sequences;
    args.logits = logits.data();
    args.routing = routing;
    moe_route(args, stream);
  }
  MoeGemm gate_up_gemm() const {
    MoeGemmProblem p;
    p.w = weights_of(gate_up, 2 * c.intermediate, c.hidden);
    p.num_experts = c.num_experts;
    p.x = c.fp8 ? codes.data.data() : static_cast<const void*>(codes.data.data());
    p.gathers = true;
    p.x_scales = row_scales.data();
    p.epilogue = Epilogue::kGated;
    p.activation = c.activation;
    p.y = h.data();
    return MoeGemm(p);
  }
  MoeGemm down_gemm() const {
    MoeGemmProblem p;
    p.w = weights_of(down, c.hidden, c.intermediate);
    p.num_experts = c.num_experts;
    p.x = inner.data.data();
    p.x_scales = inner.scales_data.data();
    p.y = y.data();
    p.tiles_known = true;
    return MoeGemm(p);
  }
  void combine(const Stream& stream = {}) const {
    MoeCombineArgs args;
    args.y = y.data();
    args.residual = residual.data();
    args.out = out.data();
    args.m = c.m;
    args.width = c.hidden;
    args.top_k = c.top_k;
    args.routing = routing;
    moe_combine(args, stream);
  }
  void run(const Stream& stream = {}) const {
    const MoeGemm up = gate_up_gemm();
    const MoeGemm down_product = down_gemm();
    route(stream);
    up.launch(routing, pairs, c.tokens, stream);
    down_product.launch(routing, pairs, c.tokens, stream);
    combine(stream);
  }

 private:
  Matrix weights_matrix(std::size_t rows, std::size_t columns) const {
    if (c.integers) return Matrix(*c.integers, rows, columns);
    return Matrix(rows, columns, c.fp8, 1.0f / std::sqrt(static_cast<float>(columns)));
  }
  WeightType type() const {
    if (c.integers) return int_has_four_bits(*c.integers) ? WeightType::kInt4 : WeightType::kInt8;
    return c.fp8 ? WeightType::kFp8 : WeightType::kBf16;
  }
  Weights weights_of(const Matrix& matrix, int n, int k) const {
    if (matrix.integers != nullptr) {
      Weights w = matrix.integers->weights();
      w.n = n;
      return w;
    }
    return {type(), n, k, matrix.data.data(), matrix.scales_data.data(), nullptr};
  }
};

}  // namespace aotllm::cuda::moe_test
