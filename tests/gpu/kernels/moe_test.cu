#include "moe/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "elementwise_check.h"
#include "moe_mixture.h"

namespace aotllm::cuda {
namespace {

using namespace moe_test;

void check_routing(const Mixture& mix) {
  const Case& c = mix.c;
  const auto experts = mix.experts.download();
  const auto weights = mix.weights.download();
  const auto places = mix.places.download();
  const auto rows = mix.rows.download();
  const auto scales = mix.row_scales.download();
  Worst worst;
  for (int row = 0; row < c.m; ++row) {
    std::vector<double> logits(c.num_experts);
    for (int e = 0; e < c.num_experts; ++e) {
      for (int i = 0; i < c.hidden; ++i) {
        logits[e] += from_bf16(mix.x[static_cast<std::size_t>(row) * c.hidden + i]) *
                     mix.router[static_cast<std::size_t>(e) * c.hidden + i];
      }
    }
    std::vector<int> order(c.num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double total = 0.0;
    for (int i = 0; i < (c.normalize ? c.top_k : c.num_experts); ++i) {
      total += std::exp(logits[order[i]] - logits[order[0]]);
    }
    for (int slot = 0; slot < c.top_k; ++slot) {
      const int pair = row * c.top_k + slot;
      const int expert = experts[pair];
      ASSERT_TRUE(expert > (slot == 0 ? -1 : experts[pair - 1]) && expert < c.num_experts)
          << describe(c) << ": pair " << pair << " has expert " << expert;
      // Where two logits are as close as float32 sums may be wrong, either may be taken.
      ASSERT_GE(logits[expert], logits[order[c.top_k - 1]] - 1e-4) << describe(c) << ": pair " << pair;
      const double want = std::exp(logits[expert] - logits[order[0]]) / total;
      worst.add(pair, weights[pair], want, 1e-4 * want + 1e-30);
    }
  }
  worst.expect(describe(c) + ": weights");

  std::vector<int> order(mix.pairs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return experts[a] < experts[b]; });
  for (int place = 0; place < mix.pairs; ++place) {
    ASSERT_EQ(places[order[place]], place) << describe(c) << ": pair " << order[place];
    ASSERT_EQ(rows[place], order[place] / c.top_k) << describe(c) << ": place " << place;
    if (c.fp8) ASSERT_EQ(scales[place], mix.codes.scales[rows[place]]) << describe(c) << ": place " << place;
  }
  const auto tiles = mix.tiles.download();
  const auto counters = mix.counters.download();
  int tile = 0;
  for (int first = 0; first < mix.pairs;) {
    const int expert = experts[order[first]];
    int count = 1;
    while (first + count < mix.pairs && experts[order[first + count]] == expert) ++count;
    const int end = tile + (count + c.tokens - 1) / c.tokens;
    for (int i = tile; i < end; ++i) {
      ASSERT_EQ(tiles[i].expert, expert) << describe(c) << ": tile " << i;
      ASSERT_EQ(tiles[i].first_place, first) << describe(c) << ": tile " << i;
      ASSERT_EQ(tiles[i].count, count) << describe(c) << ": tile " << i;
      ASSERT_EQ(tiles[i].first_tile, tile) << describe(c) << ": tile " << i;
    }
    tile = end;
    first += count;
  }
  EXPECT_EQ(counters[0], tile) << describe(c);
  EXPECT_EQ(counters[1], 0) << describe(c);
  EXPECT_LE(tile, moe_max_tiles(c.m, c.num_experts, c.top_k, c.tokens)) << describe(c);
  EXPECT_TRUE(untouched(bytes_from(tiles, tile))) << describe(c);
  EXPECT_TRUE(untouched(bytes_from(places, mix.pairs))) << describe(c);
  EXPECT_TRUE(untouched(bytes_from(rows, mix.pairs))) << describe(c);
}

/// Values of y for a product with `count` terms: rounded to bf16 after sums that FP8 keeps with fewer bits.
double allowed(const Case& c, double want) {
  return std::abs(want) * kHalfUlpBf16 + (c.fp8 ? 4e-3 : 1e-3);
}

void check_products(const Mixture& mix) {
  const Case& c = mix.c;
  const auto experts = mix.experts.download();
  const auto places = mix.places.download();
  const auto h = mix.h.download();
  const auto y = mix.y.download();
  Worst worst_h, worst_y;
  for (int pair = 0; pair < mix.pairs; ++pair) {
    const auto expert = static_cast<std::size_t>(experts[pair]);
    const auto place = static_cast<std::size_t>(places[pair]);
    const float* x = mix.codes.values.data() + static_cast<std::size_t>(pair / c.top_k) * c.hidden;
    for (int j = 0; j < c.intermediate; ++j) {
      const std::size_t row = expert * 2 * c.intermediate + j / 8 * 16 + j % 8;
      const double gate = dot(mix.gate_up.values.data() + row * c.hidden, x, c.hidden);
      const double up = dot(mix.gate_up.values.data() + (row + 8) * c.hidden, x, c.hidden);
      const double want = activate(gate, c.activation) * up;
      const std::size_t index = place * c.intermediate + j;
      worst_h.add(static_cast<std::int64_t>(index), from_bf16(h[index]), want,
                  allowed(c, want) + (c.fp8 ? 4e-3 : 1e-4) * (1 + std::abs(gate) + std::abs(up)));
    }
    for (int j = 0; j < c.hidden; ++j) {
      const double want = dot(mix.down.values.data() + (expert * c.hidden + j) * c.intermediate,
                              mix.inner.values.data() + place * c.intermediate, c.intermediate);
      const std::size_t index = place * c.hidden + j;
      worst_y.add(static_cast<std::int64_t>(index), from_bf16(y[index]), want, allowed(c, want));
    }
  }
  worst_h.expect(describe(c) + ": h");
  worst_y.expect(describe(c) + ": y");
  EXPECT_TRUE(untouched(bytes_from(h, static_cast<std::size_t>(mix.pairs) * c.intermediate))) << describe(c);
  EXPECT_TRUE(untouched(bytes_from(y, static_cast<std::size_t>(mix.pairs) * c.hidden))) << describe(c);
}

void check_combination(const Mixture& mix) {
  const Case& c = mix.c;
  const auto weights = mix.weights.download();
  const auto places = mix.places.download();
  const auto y = mix.y.download();
  const auto residual = mix.residual.download();
  const auto out = mix.out.download();
  Worst worst;
  for (int row = 0; row < c.m; ++row) {
    for (int j = 0; j < c.hidden; ++j) {
      double want = from_bf16(residual[static_cast<std::size_t>(row) * c.hidden + j]);
      for (int slot = 0; slot < c.top_k; ++slot) {
        const int pair = row * c.top_k + slot;
        want += weights[pair] * from_bf16(y[static_cast<std::size_t>(places[pair]) * c.hidden + j]);
      }
      const std::size_t index = static_cast<std::size_t>(row) * c.hidden + j;
      worst.add(static_cast<std::int64_t>(index), from_bf16(out[index]), want, std::abs(want) * kHalfUlpBf16 + 1e-5);
    }
  }
  worst.expect(describe(c) + ": out");
  EXPECT_TRUE(untouched(bytes_from(out, static_cast<std::size_t>(c.m) * c.hidden))) << describe(c);
}

void check_case(const Case& c) {
  const Mixture mix(c);
  mix.route();
  check_routing(mix);
  if (testing::Test::HasFatalFailure()) return;
  mix.gate_up_gemm().launch(mix.routing, mix.pairs, mix.c.tokens, {});
  mix.down_gemm().launch(mix.routing, mix.pairs, mix.c.tokens, {});
  check_products(mix);
  mix.combine();
  check_combination(mix);
}

TEST(Moe, MatchesFloat64) {
  AOTLLM_NEEDS_GPU();
  for (const bool fp8 : {false, true}) {
    check_case({.m = 1, .fp8 = fp8});
    check_case(
        {.m = 7, .num_experts = 60, .top_k = 4, .hidden = 256, .intermediate = 48, .fp8 = fp8, .normalize = false});
    check_case({.m = 33, .num_experts = 128, .top_k = 8, .hidden = 320, .intermediate = 160, .fp8 = fp8});
    check_case({.m = 64, .hidden = 512, .intermediate = 64, .fp8 = fp8, .activation = Activation::kGeluTanh});
    check_case({.m = 65, .num_experts = 5, .top_k = 1, .hidden = 160, .intermediate = 208, .fp8 = fp8});
    check_case({.m = 300, .num_experts = 128, .top_k = 8, .hidden = 128, .intermediate = 96, .fp8 = fp8});
    check_case({.m = 501, .hidden = 128, .intermediate = 144, .fp8 = fp8, .normalize = false});
  }
}

TEST(Moe, EveryTileSize) {
  AOTLLM_NEEDS_GPU();
  for (const bool fp8 : {false, true}) {
    for (const int tokens : {8, 16, 32, 64, 128, 160, 192, 320, 384}) {
      if (fp8 && tokens > 160) continue;  // there are none
      check_case({.m = 3, .hidden = 256, .intermediate = 320, .fp8 = fp8, .tokens = tokens});
      check_case(
          {.m = 97, .num_experts = 6, .top_k = 3, .hidden = 208, .intermediate = 176, .fp8 = fp8, .tokens = tokens});
    }
  }
}

TEST(Moe, OneExpertTakesAllAndOthersNone) {
  AOTLLM_NEEDS_GPU();
  for (const bool fp8 : {false, true}) {
    check_case({.m = 40, .fp8 = fp8, .favourite = 7});
    check_case({.m = 200, .num_experts = 16, .top_k = 1, .fp8 = fp8, .favourite = 3});
    check_case({.m = 200, .num_experts = 16, .top_k = 4, .fp8 = fp8, .avoided_from = 4});
    check_case({.m = 9, .num_experts = 3, .top_k = 3, .fp8 = fp8});
  }
}

TEST(Moe, LongSums) {
  AOTLLM_NEEDS_GPU();
  for (const bool fp8 : {false, true}) {
    check_case({.m = 5, .num_experts = 4, .hidden = 2048, .intermediate = 768, .fp8 = fp8});
    check_case({.m = 70, .num_experts = 4, .hidden = 1024, .intermediate = 1024, .fp8 = fp8, .tokens = 128});
  }
}

TEST(Moe, EqualLogitsGoToTheLowerExpert) {
  AOTLLM_NEEDS_GPU();
  for (const int m : {3, 100}) {
    const Case c{.m = m, .num_experts = 40, .top_k = 5};
    Mixture mix(c);
    for (std::size_t i = 0; i < mix.router.size(); ++i) mix.router[i] = mix.router[i % c.hidden];
    mix.router_data.upload(mix.router);
    mix.route();
    const auto experts = mix.experts.download();
    const auto weights = mix.weights.download();
    for (int pair = 0; pair < mix.pairs; ++pair) {
      EXPECT_EQ(experts[pair], pair % c.top_k);
      EXPECT_FLOAT_EQ(weights[pair], 1.0f / c.top_k);
    }
  }
}

TEST(Moe, PaddingTakesTheExpertsOfTheFirstRow) {
  AOTLLM_NEEDS_GPU();
  for (const int m : {8, 100}) {
    const Case c{.m = m, .num_experts = 64, .top_k = 4};
    Mixture mix(c);
    mix.route();
    const auto want = mix.experts.download();
    std::vector<std::int32_t> sequences(m, 0);
    for (int row = 5; row < m; ++row) sequences[row] = -1;
    const DeviceArray<std::int32_t> device(sequences);
    mix.sequences = device.data();
    mix.route();
    const auto experts = mix.experts.download();
    for (int pair = 0; pair < mix.pairs; ++pair) {
      EXPECT_EQ(experts[pair], want[pair / c.top_k < 5 ? pair : pair % c.top_k]) << "m " << m << " pair " << pair;
    }
  }
}

/// `all`'s rows, but only the first `m` of them in tiles of `tokens`.
struct Part {
  int m, tokens;
};

/// What a row becomes does not depend on the rows beside it, nor on tiles.
void check_rows_stand_alone(const Case& all, const std::vector<Part>& parts) {
  Mixture mix(all);
  mix.run();
  const auto want_weights = mix.weights.download();
  const auto want_places = mix.places.download();
  const auto want_h = mix.h.download();
  for (const auto& [m, tokens] : parts) {
    mix.c.m = m;
    mix.c.tokens = tokens;
    mix.pairs = m * all.top_k;
    mix.tiles = Mixture::poisoned<MoeTile>(moe_max_tiles(m, all.num_experts, all.top_k, tokens));
    mix.routing.tiles = mix.tiles.data();
    mix.h.fill(0xFF);
    mix.run();
    const auto weights = mix.weights.download();
    const auto places = mix.places.download();
    const auto h = mix.h.download();
    for (int pair = 0; pair < mix.pairs; ++pair) {
      ASSERT_EQ(weights[pair], want_weights[pair]) << "m " << m << " pair " << pair;
      for (int j = 0; j < all.intermediate; ++j) {
        const Bf16 got = h[static_cast<std::size_t>(places[pair]) * all.intermediate + j];
        const Bf16 want = want_h[static_cast<std::size_t>(want_places[pair]) * all.intermediate + j];
        ASSERT_EQ(__bfloat16_as_ushort(got), __bfloat16_as_ushort(want))
            << describe(mix.c) << " pair " << pair << " column " << j;
      }
    }
  }
}

TEST(Moe, RowsStandAlone) {
  AOTLLM_NEEDS_GPU();
  const Case all{.m = 230, .num_experts = 16, .top_k = 4, .hidden = 512, .intermediate = 256, .tokens = 128};
  const std::vector<Part> parts = {{1, 8}, {5, 16}, {64, 32}, {65, 8}, {130, 64}, {230, 160}};
  for (const bool fp8 : {false, true}) {
    Case c = all;
    c.fp8 = fp8;
    check_rows_stand_alone(c, parts);
  }
  check_rows_stand_alone(all, {{201, 320}});
}

constexpr IntFormat kIntFormats[] = {IntFormat::kInt4Group128, IntFormat::kInt4Group32, IntFormat::kInt8Row,
                                     IntFormat::kInt8Group32};

TEST(Moe, IntegersMatchFloat64) {
  AOTLLM_NEEDS_GPU();
  for (const IntFormat format : kIntFormats) {
    for (const int tokens : {8, 16, 32, 64, 128}) {
      check_case({.m = 3, .hidden = 256, .intermediate = 320, .integers = format, .tokens = tokens});
      check_case({.m = 97,
                  .num_experts = 6,
                  .top_k = 3,
                  .hidden = 448,
                  .intermediate = 160,
                  .integers = format,
                  .activation = Activation::kGeluTanh,
                  .tokens = tokens});
    }
    for (const int tokens : {64, 128}) {  // tiles that are full
      check_case(
          {.m = 300, .num_experts = 4, .hidden = 320, .intermediate = 288, .integers = format, .tokens = tokens});
    }
    check_case({.m = 1, .num_experts = 4, .hidden = 2048, .intermediate = 768, .integers = format});
    check_case({.m = 200, .num_experts = 16, .top_k = 1, .integers = format, .favourite = 3});
    check_case({.m = 33, .num_experts = 128, .top_k = 8, .hidden = 192, .intermediate = 32, .integers = format});
  }
}

/// Engines that shall be deterministic rely on it.
TEST(Moe, RowsOfIntegersStandAloneInTilesThatAreNotSmall) {
  AOTLLM_NEEDS_GPU();
  static_assert(kMoeAlikeIntTokens == 32);
  for (const IntFormat format : kIntFormats) {
    check_rows_stand_alone({.m = 700,
                            .num_experts = 8,
                            .top_k = 2,
                            .hidden = 448,
                            .intermediate = 96,
                            .integers = format,
                            .tokens = kMoeMostIntTokens},
                           {{1, 32}, {7, 64}, {64, 32}, {64, 128}, {90, 64}, {700, 64}, {700, 32}, {501, 128}});
  }
}

/// In a graph with programmatic launches, many times, it stays what it was.
TEST(Moe, RunsInGraphs) {
  AOTLLM_NEEDS_GPU();
  for (const Case& c :
       {Case{.m = 8, .num_experts = 32, .top_k = 4, .hidden = 512, .intermediate = 256},
        Case{.m = 120, .num_experts = 32, .top_k = 4, .hidden = 512, .intermediate = 256, .fp8 = true},
        Case{.m = 8, .num_experts = 32, .hidden = 512, .intermediate = 256, .integers = IntFormat::kInt4Group128},
        Case{.m = 300, .num_experts = 8, .hidden = 512, .intermediate = 256, .integers = IntFormat::kInt8Row}}) {
    const Mixture mix(c);
    mix.run();
    const auto want = mix.out.download();
    cudaStream_t handle;
    check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream");
    check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < 10; ++i) mix.run({handle, true});
    cudaGraph_t graph;
    check(cudaStreamEndCapture(handle, &graph), "end of capture");
    cudaGraphExec_t exec;
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (int i = 0; i < 5; ++i) check(cudaGraphLaunch(exec, handle), "launch");
    check(cudaStreamSynchronize(handle), "graph");
    const auto got = mix.out.download();
    const std::size_t count = static_cast<std::size_t>(c.m) * c.hidden;
    EXPECT_EQ(std::memcmp(got.data(), want.data(), count * sizeof(Bf16)), 0) << describe(c);
    check(cudaGraphExecDestroy(exec), "destroy");
    check(cudaGraphDestroy(graph), "destroy");
    check(cudaStreamDestroy(handle), "destroy");
  }
}

/// What was fastest on an H200.
TEST(Moe, TilesFitTheRowsOfAnExpert) {
  struct Row {
    int m, num_experts, top_k, bf16, fp8, integers;
  };
  for (const Row& r : {Row{1, 8, 2, 8, 8, 8}, Row{8, 8, 2, 8, 8, 8}, Row{64, 8, 2, 32, 32, 32},
                       Row{512, 8, 2, 160, 160, 128}, Row{2048, 8, 2, 192, 128, 128}, Row{4096, 8, 2, 384, 128, 128},
                       Row{1, 128, 8, 8, 8, 8}, Row{64, 128, 8, 8, 8, 8}, Row{512, 128, 8, 64, 64, 64},
                       Row{2048, 128, 8, 160, 160, 128}, Row{4096, 128, 8, 320, 128, 128}}) {
    for (const auto& [type, tokens] : {std::pair{WeightType::kBf16, r.bf16},
                                       {WeightType::kFp8, r.fp8},
                                       {WeightType::kInt4, r.integers},
                                       {WeightType::kInt8, r.integers}}) {
      EXPECT_EQ(moe_tile_tokens(r.m, r.num_experts, r.top_k, type), tokens)
          << "m " << r.m << " of " << r.num_experts << " type " << static_cast<int>(type);
    }
  }
}

TEST(Moe, RefusesWhatNoKernelTakes) {
  AOTLLM_NEEDS_GPU();
  MoeRouteArgs args;
  args.m = 1;
  args.width = 64;
  args.num_experts = kMoeMaxExperts + 1;
  args.top_k = 2;
  args.tokens = 8;
  EXPECT_ANY_THROW(moe_route(args, {}));
  args.num_experts = 4;
  args.top_k = 5;
  EXPECT_ANY_THROW(moe_route(args, {}));
  MoeGemmProblem p;
  p.num_experts = 2;
  p.w = {WeightType::kInt8, 64, 64, nullptr, nullptr, nullptr};
  EXPECT_ANY_THROW(MoeGemm{p}) << "no scales";
  const IntMatrix w(IntFormat::kInt4Group128, 2 * 80, 128);
  p.w = w.weights();
  p.w.n = 80;
  EXPECT_ANY_THROW(MoeGemm{p}) << "blocks cross experts";
  p.w = {WeightType::kBf16, 24, 64, nullptr, nullptr, nullptr};
  EXPECT_ANY_THROW(MoeGemm{p});
}

}  // namespace
}  // namespace aotllm::cuda
