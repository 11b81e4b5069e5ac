#include "runner/cuda/mixtures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Case {
  int num_experts = 8;
  int top_k = 2;
  int width = 256;
  int neurons = 96;
  bool fp8 = false;
};

/// A plan of one op, and the values of what it names.
struct Model {
  Case c;
  std::vector<float> router, norm, scales[2];
  std::vector<float> values[2];  // gate_up and down
  std::vector<std::uint8_t> bytes[2];
  Plan plan;

  explicit Model(const Case& from) : c(from) {
    const std::size_t experts = c.num_experts;
    router = random_normal(experts * c.width, 0.2f);
    norm.assign(c.width, 1.0f);
    add_linear(0, experts * 2 * c.neurons, c.width);
    add_linear(1, experts * c.width, c.neurons);
    plan.target = Target::kCuda;
    plan.max_num_tokens = 256;
    plan.buffers = {{"hidden", c.width, 0}};
    NormMoeOp op;
    op.norm = norm;
    op.router = router;
    op.num_experts = c.num_experts;
    op.top_k = c.top_k;
    op.normalize = true;
    op.down = 1;
    op.neurons = c.neurons;
    plan.ops = {op};
  }

  void add_linear(int index, std::size_t rows, int k) {
    const std::vector<float> drawn = random_normal(rows * k, (c.fp8 ? 16.0f : 1.0f) / std::sqrt(k));
    values[index].resize(drawn.size());
    bytes[index].resize(drawn.size() * (c.fp8 ? 1 : 2));
    if (c.fp8) {
      bytes[index] = to_fp8(drawn);
      for (std::size_t row = 0; row < rows; ++row) scales[index].push_back(0.05f + 0.01f * (row % 7));
      for (std::size_t i = 0; i < drawn.size(); ++i) {
        values[index][i] = static_cast<float>(from_fp8(bytes[index][i])) * scales[index][i / k];
      }
    } else {
      const auto rounded = to_bf16(drawn);
      std::memcpy(bytes[index].data(), rounded.data(), bytes[index].size());
      for (std::size_t i = 0; i < drawn.size(); ++i) values[index][i] = static_cast<float>(from_bf16(rounded[i]));
    }
    Linear linear;
    linear.name = index == 0 ? "gate_up" : "down";
    linear.n = static_cast<int>(rows);
    linear.k = k;
    linear.matrix = {c.fp8 ? MatrixFormat::kFp8 : MatrixFormat::kBf16, bytes[index], scales[index], {}};
    plan.linears.push_back(linear);
  }

  double product(int index, std::size_t row, const std::vector<double>& x) const {
    const float* w = values[index].data() + row * x.size();
    double sum = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += w[i] * x[i];
    return sum;
  }

  /// The weighted sum of a row's experts, which are chosen by `routed` and read `x`.
  std::vector<double> mix(const std::vector<double>& routed, const std::vector<double>& x) const {
    std::vector<double> logits(c.num_experts);
    for (int e = 0; e < c.num_experts; ++e) {
      for (int i = 0; i < c.width; ++i) logits[e] += router[static_cast<std::size_t>(e) * c.width + i] * routed[i];
    }
    std::vector<int> order(c.num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double total = 0.0;
    for (int i = 0; i < c.top_k; ++i) total += std::exp(logits[order[i]] - logits[order[0]]);
    std::vector<double> out(c.width);
    for (int i = 0; i < c.top_k; ++i) {
      const auto expert = static_cast<std::size_t>(order[i]);
      std::vector<double> gated(c.neurons);
      for (int j = 0; j < c.neurons; ++j) {
        const std::size_t row = expert * 2 * c.neurons + j / 8 * 16 + j % 8;
        const double gate = product(0, row, x);
        gated[j] = gate / (1.0 + std::exp(-gate)) * product(0, row + 8, x);
      }
      const double weight = std::exp(logits[expert] - logits[order[0]]) / total;
      for (int j = 0; j < c.width; ++j) out[j] += weight * product(1, expert * c.width + j, gated);
    }
    return out;
  }
};

void check_case(const Case& c) {
  const Model model(c);
  const WeightStore weights(model.plan);
  Mixtures mixtures(model.plan, weights, false);
  constexpr int kRows = 256;
  const std::size_t size = static_cast<std::size_t>(kRows) * c.width;
  const std::vector<Bf16> x = random_bf16(size);
  const std::vector<Bf16> residual = random_bf16(size);
  std::vector<float> scaled(size);
  for (std::size_t i = 0; i < size; ++i) scaled[i] = static_cast<float>(from_bf16(x[i])) * 32.0f;
  const std::vector<std::uint8_t> codes = to_fp8(scaled);
  const DeviceArray<Bf16> x_data(x), residual_data(residual);
  const DeviceArray<std::uint8_t> codes_data(codes);
  const DeviceArray<float> scales_data(std::vector<float>(kRows, 1.0f / 32.0f));
  const int index =
      mixtures.add(std::get<NormMoeOp>(model.plan.ops[0]), {x_data.data(), codes_data.data(), scales_data.data()});
  for (const int rows : {1, 5, 64, 200}) {
    DeviceArray<Bf16> out(size);
    out.fill(0xFF);
    std::vector<std::int32_t> sequences(rows, 0);
    if (rows > 1) sequences.back() = -1;  // padding, which may be anything
    const DeviceArray<std::int32_t> sequences_data(sequences);
    for (const Bf16* added : {residual_data.data(), static_cast<Bf16*>(nullptr)}) {
      mixtures.launch(index, {rows, sequences_data.data(), added, out.data()}, {});
      const auto got = out.download();
      std::vector<double> have, want;
      for (int row = 0; row < std::max(1, rows - 1); ++row) {
        std::vector<double> routed(c.width), read(c.width);
        for (int i = 0; i < c.width; ++i) {
          const std::size_t at = static_cast<std::size_t>(row) * c.width + i;
          routed[i] = from_bf16(x[at]);
          read[i] = c.fp8 ? from_fp8(codes[at]) / 32.0 : routed[i];
        }
        const std::vector<double> sum = model.mix(routed, read);
        for (int i = 0; i < c.width; ++i) {
          const std::size_t at = static_cast<std::size_t>(row) * c.width + i;
          have.push_back(from_bf16(got[at]));
          want.push_back(sum[i] + (added == nullptr ? 0.0 : from_bf16(residual[at])));
        }
      }
      // Of FP8 what the experts write in between has 4 bits.
      EXPECT_LE(relative_error(have, want), c.fp8 ? 3e-2 : 5e-3) << (c.fp8 ? "fp8 " : "bf16 ") << rows << " rows";
    }
  }
}

TEST(Mixtures, ComputeWhatTheOpSays) {
  AOTLLM_NEEDS_GPU();
  for (const bool fp8 : {false, true}) {
    check_case({.fp8 = fp8});
    check_case({.num_experts = 40, .top_k = 6, .width = 128, .neurons = 96, .fp8 = fp8});
  }
}

TEST(Mixtures, RefuseFormatsThatNoKernelTakes) {
  AOTLLM_NEEDS_GPU();
  Model model({});
  const WeightStore weights(model.plan);
  Mixtures mixtures(model.plan, weights, false);
  for (const MatrixFormat down : {MatrixFormat::kFp8Block, MatrixFormat::kInt8}) {
    model.plan.linears[1].matrix.format = down;
    EXPECT_ANY_THROW(mixtures.add(std::get<NormMoeOp>(model.plan.ops[0]), {})) << static_cast<int>(down);
  }
}

}  // namespace
}  // namespace aotllm::cuda
