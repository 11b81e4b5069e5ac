#include "runner/cuda/layer_chains.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "reference.h"

namespace aotllm::cuda {
namespace {

constexpr int kHidden = 0, kQ = 1, kAttended = 2, kInner = 3, kOther = 4;  // buffers
constexpr int kQkvOf = 0, kOutputOf = 1, kGateUpOf = 2, kDownOf = 3;       // linears of a layer
constexpr std::size_t kOutput = 3, kSwiglu = 4, kDown = 5, kQkv = 6;       // ops of the first layer, and the next one's
constexpr std::size_t kSecond = 8, kHead = 11;

/// Two layers, with memory that all weights of a kind share.
struct Model {
  std::vector<std::uint8_t> bytes;
  std::vector<float> floats;
  Plan plan;

  explicit Model(MatrixFormat format = MatrixFormat::kFp8, int hidden = 256) {
    const int inner = 2 * hidden;
    const int heads_width = 256;
    bytes.resize(static_cast<std::size_t>(2) * 2 * inner * hidden);
    floats.resize(static_cast<std::size_t>(2) * inner, 1.0f);
    plan.target = Target::kCuda;
    plan.sm = 90;
    plan.hidden_size = hidden;
    plan.max_num_tokens = 128;
    std::int64_t offset = 0;
    for (const int width : {hidden, heads_width, heads_width, inner, std::max(hidden, inner)}) {
      plan.buffers.push_back({"", width, offset});
      offset += plan.buffer_bytes(plan.buffers.back());
    }
    plan.arena_bytes = offset;
    EmbeddingOp embedding;
    embedding.out = kHidden;
    embedding.linear = add_linear(MatrixFormat::kBf16, 64, hidden);
    plan.ops.push_back(embedding);
    for (int layer = 0; layer < 2; ++layer) add_layer(layer, format, heads_width, inner);
    LmHeadOp head;
    head.in = kHidden;
    head.norm = std::span(floats).first(static_cast<std::size_t>(hidden));
    plan.ops.push_back(head);
  }

  int add_linear(MatrixFormat format, int n, int k) {
    Linear linear;
    linear.n = n;
    linear.k = k;
    const std::size_t size = static_cast<std::size_t>(n) * k * (format == MatrixFormat::kBf16 ? 2 : 1);
    linear.matrix = {format, std::span(bytes).first(size), std::span(floats).first(n), {}};
    plan.linears.push_back(linear);
    return static_cast<int>(plan.linears.size()) - 1;
  }

  void add_layer(int layer, MatrixFormat format, int heads_width, int inner) {
    const int hidden = plan.hidden_size;
    const auto norm = std::span<const float>(floats).first(static_cast<std::size_t>(hidden));
    NormQkvRopeOp qkv;
    qkv.layer = layer;
    qkv.in = kHidden;
    qkv.out = kQ;
    qkv.norm = norm;
    qkv.linear = add_linear(format, heads_width + 128, hidden);
    PagedAttentionOp attention;
    attention.layer = layer;
    attention.in = kQ;
    attention.out = kAttended;
    LinearResidualOp output;
    output.in = kAttended;
    output.residual = output.out = kHidden;
    output.linear = add_linear(format, hidden, heads_width);
    NormSwigluOp swiglu;
    swiglu.in = kHidden;
    swiglu.out = kInner;
    swiglu.norm = norm;
    swiglu.gate_up = add_linear(format, 2 * inner, hidden);
    LinearResidualOp down;
    down.in = kInner;
    down.residual = down.out = kHidden;
    down.linear = add_linear(format, hidden, inner);
    for (const Op& op : {Op(qkv), Op(attention), Op(output), Op(swiglu), Op(down)}) plan.ops.push_back(op);
  }

  template <class AnyOp>
  AnyOp& op(std::size_t index) {
    return std::get<AnyOp>(plan.ops[index]);
  }
  MatrixFormat& format(int layer, int which) {
    return plan.linears[static_cast<std::size_t>(1 + 4 * layer + which)].matrix.format;
  }
};

using Found = std::vector<LayerOps>;
const Found kBoth = {{kOutput, true}, {kSecond, false}};
const Found kFirst = {{kOutput, true}};
const Found kLast = {{kSecond, false}};

struct Case {
  std::string name;
  std::function<void(Model&)> change;
  Found found;
};

TEST(LayerChains, AreProductsThatCanBeChainedBetweenTwoAttentions) {
  const std::vector<Case> cases = {
      {"a plain model", [](Model&) {}, kBoth},
      {"biases",
       [](Model& m) {
         m.op<LinearResidualOp>(kOutput).bias = m.floats;
         m.op<NormSwigluOp>(kSwiglu).gate_up_bias = m.floats;
         m.op<NormQkvRopeOp>(kQkv).bias = m.floats;
       },
       kBoth},
      {"norms of Q and K", [](Model& m) { m.op<NormQkvRopeOp>(kQkv).q_norm = m.floats; }, kBoth},
      {"sums over one rank", [](Model& m) { m.op<LinearResidualOp>(kDown).all_reduce = true; }, kBoth},
      {"residuals of their own",
       [](Model& m) {
         m.op<LinearResidualOp>(kOutput).out = m.op<NormSwigluOp>(kSwiglu).in = kOther;
         m.op<LinearResidualOp>(kDown).residual = kOther;
       },
       kBoth},
      {"a norm after the output", [](Model& m) { m.op<LinearResidualOp>(kOutput).post_norm = m.floats; }, kLast},
      {"a norm after down", [](Model& m) { m.op<LinearResidualOp>(kDown).post_norm = m.floats; }, kLast},
      {"experts",
       [](Model& m) {
         m.plan.ops[kSwiglu] = NormMoeOp{};
         m.plan.ops.erase(m.plan.ops.begin() + kDown);
       },
       {{kSecond - 1, false}}},
      {"no norm before gate and up", [](Model& m) { m.op<NormSwigluOp>(kSwiglu).norm = {}; }, kLast},
      {"no norm before QKV",
       [](Model& m) { m.op<NormQkvRopeOp>(kQkv).norm = {}; },
       {{kOutput, false}, {kSecond, false}}},
      {"an output of something else", [](Model& m) { m.op<LinearResidualOp>(kOutput).in = kQ; }, kLast},
      {"gate and up of something else", [](Model& m) { m.op<NormSwigluOp>(kSwiglu).in = kOther; }, kLast},
      {"down of something else", [](Model& m) { m.op<LinearResidualOp>(kDown).in = kOther; }, kLast},
      {"down added to something else", [](Model& m) { m.op<LinearResidualOp>(kDown).residual = kOther; }, kLast},
      {"QKV of something else",
       [](Model& m) { m.op<NormQkvRopeOp>(kQkv).in = kOther; },
       {{kOutput, false}, {kSecond, false}}},
      {"attention's output read again", [](Model& m) { m.op<LmHeadOp>(kHead).in = kAttended; }, kFirst},
      {"the activation read again", [](Model& m) { m.op<LmHeadOp>(kHead).in = kInner; }, kFirst},
      {"QKV in another format",
       [](Model& m) { m.format(1, kQkvOf) = MatrixFormat::kBf16; },
       {{kOutput, false}, {kSecond, false}}},
      {"an output in another format", [](Model& m) { m.format(0, kOutputOf) = MatrixFormat::kBf16; }, kLast},
      {"gate and up in another format", [](Model& m) { m.format(0, kGateUpOf) = MatrixFormat::kFp8Block; }, kLast},
      {"down in another format", [](Model& m) { m.format(0, kDownOf) = MatrixFormat::kInt4; }, kLast},
      {"an older device", [](Model& m) { m.plan.sm = 89; }, {}},
      {"several ranks", [](Model& m) { m.plan.tp_size = 2; }, {}},
      {"several stages", [](Model& m) { m.plan.pp_size = 2; }, kBoth},
      {"a residual stream that leaves the stage",
       [](Model& m) {
         m.plan.pp_size = 2;
         m.plan.leaving = kHidden;
         m.plan.ops.pop_back();
       },
       kBoth},
      {"an activation that leaves the stage",
       [](Model& m) {
         m.plan.pp_size = 2;
         m.plan.leaving = kInner;
         m.plan.ops.pop_back();
       },
       kFirst},
  };
  for (const Case& c : cases) {
    Model model;
    c.change(model);
    EXPECT_EQ(find_layer_ops(model.plan, false), c.found) << c.name;
  }
}

TEST(LayerChains, AreOfFp8WithAScalePerRow) {
  for (const MatrixFormat format :
       {MatrixFormat::kBf16, MatrixFormat::kFp8Block, MatrixFormat::kInt8, MatrixFormat::kInt4}) {
    EXPECT_EQ(find_layer_ops(Model(format).plan, false), Found{}) << static_cast<int>(format);
  }
}

TEST(LayerChains, AreNoneWhereRowsMustNotDependOnTheBatch) {
  EXPECT_EQ(find_layer_ops(Model().plan, true), Found{});
}

StepShape decode_of(int rows) {
  StepShape shape;
  shape.rows = shape.num_queries = shape.sequences = rows;
  return shape;
}

/// A model's chains, and what they are bound to.
struct Bound {
  Model model;
  WeightStore weights{model.plan};
  DeviceArray<std::uint8_t> arena{static_cast<std::size_t>(model.plan.arena_bytes)};
  DeviceArray<Bf16> qkv{static_cast<std::size_t>(model.plan.device_rows()) * 384};
  DeviceArray<std::uint8_t> workspace{kWorkspaceBytes};
  LayerChains chains;

  explicit Bound(int hidden) : model(MatrixFormat::kFp8, hidden) {
    workspace.fill(0);
    chains = LayerChains(model.plan, weights, false, arena.data(), qkv.data(), {workspace.data(), workspace.size()});
  }
};

TEST(LayerChains, RunInDecodeStepsOfFewRows) {
  AOTLLM_NEEDS_GPU();
  const Bound bound(256);
  const LayerChains& chains = bound.chains;
  for (const int rows : {1, 8, 9, 16, 17}) {
    const StepShape decode = decode_of(rows);
    StepShape mixed = decode;
    mixed.num_tiles = 1;
    const bool few = rows <= kLayerMaxRows;
    for (const LayerOps& ops : kBoth) {
      const auto* chain = chains.find(ops.begin, decode);
      ASSERT_EQ(chain != nullptr, few) << rows;
      const GroupCodes codes = chains.codes_after(ops.begin - 1, decode);
      ASSERT_EQ(codes.codes != nullptr, few) << rows;
      if (few) {
        EXPECT_EQ(chain->ops, ops);
        EXPECT_EQ(codes.scale_rows, rows <= 8 ? 8 : 16);
      }
      EXPECT_EQ(chains.find(ops.begin, mixed), nullptr) << rows;
      EXPECT_EQ(chains.codes_after(ops.begin - 1, mixed).codes, nullptr) << rows;
    }
    EXPECT_EQ(chains.find(kSwiglu, decode), nullptr);
    EXPECT_EQ(chains.codes_after(kOutput, decode).codes, nullptr);
  }
}

TEST(LayerChains, LeaveSizesThatNoKernelTakes) {
  AOTLLM_NEEDS_GPU();
  const Bound bound(160);
  ASSERT_EQ(find_layer_ops(bound.model.plan, false), kBoth);
  EXPECT_EQ(bound.chains.find(kOutput, decode_of(1)), nullptr);
  EXPECT_EQ(bound.chains.find(kSecond, decode_of(1)), nullptr);
}

}  // namespace
}  // namespace aotllm::cuda
