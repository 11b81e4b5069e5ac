#include "runner/lora.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "allocation_counter.h"
#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "kernels.h"
#include "naive_model.h"
#include "random_tactics.h"
#include "tiny_model.h"

namespace aotllm {
namespace {

using enum AdapterModule;
using testing_support::NaiveModel;
using testing_support::random_tactics;
using testing_support::TinyModel;
using testing_support::TinySpec;

constexpr AdapterModule kAll[] = {kQ, kK, kV, kO, kGate, kUp, kDown};
constexpr AdapterId kLow = 3;   // in the tests below: rank 2 on every module
constexpr AdapterId kHigh = 7;  // mixed ranks, up to 33, on some modules of some layers

CpuRunner make_runner(const TinyModel& model, int num_threads) {
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {num_threads, nullptr});
  runner.allocate_kv({.device_blocks = {128, 128, 128, 128}});
  return runner;
}

std::vector<float> random_values(std::mt19937& random, std::size_t count, float size) {
  std::uniform_real_distribution<float> value(-size, size);
  std::vector<float> values(count);
  for (float& v : values) v = value(random);
  return values;
}

LowRankUpdate random_update(const TinyModel& model, int layer, AdapterModule module, int rank, std::mt19937& random) {
  const auto& w = model.matrices.at("layers." + std::to_string(layer) + "." + adapter_module_name(module));
  return {layer,
          module,
          rank,
          w.k,
          w.n,
          random_values(random, static_cast<std::size_t>(rank) * w.k, 0.5f),
          random_values(random, static_cast<std::size_t>(w.n) * rank, 0.5f / std::sqrt(static_cast<float>(rank)))};
}

Adapter low_adapter(const TinyModel& model) {
  std::mt19937 random(21);
  Adapter adapter;
  for (int layer = 0; layer < model.spec.layers; ++layer) {
    for (const AdapterModule module : kAll) adapter.updates.push_back(random_update(model, layer, module, 2, random));
  }
  return adapter;
}

Adapter high_adapter(const TinyModel& model) {
  std::mt19937 random(22);
  Adapter adapter;
  const std::pair<AdapterModule, int> ranks[] = {{kUp, 33}, {kV, 17}, {kQ, 16}, {kDown, 1}};
  for (const auto& [module, rank] : ranks) adapter.updates.push_back(random_update(model, 0, module, rank, random));
  adapter.updates.push_back(random_update(model, 1, kK, 5, random));
  adapter.updates.push_back(random_update(model, 1, kO, 20, random));
  return adapter;
}

std::vector<TokenId> random_tokens(int count, int vocab, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> tokens(count);
  for (TokenId& t : tokens) t = static_cast<TokenId>(random() % vocab);
  return tokens;
}

struct Prompt {
  std::vector<TokenId> tokens;
  AdapterId adapter = 0;
};

/// Logits of every token of every prompt while the prompts run side by side, `chunk` tokens of each in a step.
std::vector<std::vector<float>> run_all(CpuRunner& runner, const std::vector<Prompt>& prompts, std::size_t chunk) {
  std::vector<std::vector<BlockId>> blocks(prompts.size());
  BlockId next = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    for (std::size_t t = 0; t < prompts[i].tokens.size(); t += 16) blocks[i].push_back(next++);
  }
  std::vector<std::vector<float>> logits(prompts.size());
  StepOutputs outputs;
  for (std::size_t start = 0;; start += chunk) {
    std::vector<SequenceStep> steps;
    std::vector<std::size_t> live;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const auto& tokens = prompts[i].tokens;
      if (start >= tokens.size()) continue;
      const auto part = std::span(tokens).subspan(start, std::min(chunk, tokens.size() - start));
      SequenceStep step{part, static_cast<std::int32_t>(start), {}, LogitsMode::kAll, prompts[i].adapter};
      step.block_tables.fill(blocks[i]);
      steps.push_back(step);
      live.push_back(i);
    }
    if (steps.empty()) return logits;
    runner.step(steps, outputs);
    int row = 0;
    for (std::size_t s = 0; s < steps.size(); ++s) {
      for (std::size_t t = 0; t < steps[s].tokens.size(); ++t, ++row) {
        const auto values = outputs.row(row);
        logits[live[s]].insert(logits[live[s]].end(), values.begin(), values.end());
      }
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Case {
  const char* name;
  TinySpec spec;
  double tolerance;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

std::vector<Case> cases() {
  TinySpec gemma{.bias = true,
                 .qk_norm = true,
                 .post_norm = true,
                 .window = 5,
                 .final_softcap = 1.5f,
                 .embedding_scale = 5.5f,
                 .activation = "gelu_tanh"};
  TinySpec unaligned{.head_dim = 24, .rotary_half = 6, .one_qkv_segment = true, .bias = true};
  TinySpec odd_sizes{.vocab = 37, .hidden = 40, .heads = 3, .kv_heads = 3, .head_dim = 8, .intermediate = 19};
  TinySpec mixed{.hidden = 64, .intermediate = 96, .v_format = "q8_0"};
  return {{"llama", {}, 5e-5},
          {"biased", {.bias = true}, 5e-5},
          {"gemma", gemma, 5e-5},
          {"unaligned", unaligned, 5e-5},
          {"odd_sizes", odd_sizes, 5e-5},
          {"mixed_formats", mixed, 5e-3},
          {"bf16", {.v_format = "bf16"}, 5e-3}};
}

class LoraCase : public testing::TestWithParam<Case> {
 protected:
  LoraCase() : model(GetParam().spec) {}

  CpuRunner loaded_runner(int num_threads) const {
    CpuRunner runner = make_runner(model, num_threads);
    runner.load_adapter(kLow, low_adapter(model));
    runner.load_adapter(kHigh, high_adapter(model));
    return runner;
  }
  std::vector<TokenId> tokens(int count, unsigned seed) const { return random_tokens(count, model.spec.vocab, seed); }

  TinyModel model;
};

INSTANTIATE_TEST_SUITE_P(Models, LoraCase, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(LoraCase, AgreesWithTheDefinition) {
  const auto prompt = tokens(40, 3);
  CpuRunner runner = loaded_runner(2);
  const auto bare = NaiveModel(model).forward(prompt);
  for (const auto& [id, adapter] : {std::pair{kLow, low_adapter(model)}, std::pair{kHigh, high_adapter(model)}}) {
    const auto logits = run_all(runner, {{prompt, id}}, 64)[0];
    const auto expected = NaiveModel(model, adapter).forward(prompt);
    double error = 0;
    double effect = 0;
    for (std::size_t t = 0; t < prompt.size(); ++t) {
      for (int i = 0; i < model.spec.vocab; ++i) {
        error = std::max(error, std::abs(logits[t * model.spec.vocab + i] - expected[t][i]));
        effect = std::max(effect, std::abs(expected[t][i] - bare[t][i]));
      }
    }
    EXPECT_LT(error, GetParam().tolerance) << "adapter " << id;
    EXPECT_GT(effect, 20 * GetParam().tolerance) << "the adapter hardly matters";
  }
}

TEST_P(LoraCase, EachModuleAloneAgreesWithTheDefinition) {
  const auto prompt = tokens(5, 4);
  for (const AdapterModule module : kAll) {
    std::mt19937 random(5);
    const Adapter adapter{{random_update(model, 1, module, 3, random)}};
    CpuRunner runner = make_runner(model, 2);
    runner.load_adapter(1, adapter);
    const auto logits = run_all(runner, {{prompt, 1}}, 64)[0];
    const auto expected = NaiveModel(model, adapter).forward(prompt);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      ASSERT_NEAR(logits[i], expected[i / model.spec.vocab][i % model.spec.vocab], GetParam().tolerance)
          << adapter_module_name(module);
    }
  }
}

TEST_P(LoraCase, BitsDoNotDependOnNeighboursChunksThreadsOrTactics) {
  std::vector<Prompt> prompts;
  const AdapterId ids[] = {kLow, 0, kHigh, kHigh, 0, kLow, kLow, 0};
  for (int i = 0; i < 8; ++i) prompts.push_back({tokens(1 + 5 * i, 100 + i), ids[i]});

  CpuRunner reference = loaded_runner(1);
  CpuRunner bare = make_runner(model, 1);  // has never seen an adapter
  std::vector<std::vector<float>> alone;
  for (const Prompt& prompt : prompts) {
    alone.push_back(run_all(prompt.adapter == 0 ? bare : reference, {prompt}, 128)[0]);
  }
  for (const int num_threads : {1, 2, 3}) {
    CpuRunner runner = loaded_runner(num_threads);
    if (num_threads > 1) {  // tiles of more rows than are updated at a time among them
      std::mt19937 random(static_cast<unsigned>(num_threads));
      const Engine engine = Engine::from_bytes(model.engine_bytes(), "tiny.engine");
      runner.set_tactics(random_tactics(engine.plan(), num_threads, random));
    }
    for (const std::size_t chunk : {1, 7, 16}) {
      const auto together = run_all(runner, prompts, chunk);
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        EXPECT_TRUE(same_bits(together[i], alone[i]))
            << num_threads << " threads, chunks of " << chunk << ", prompt " << i << ", adapter " << ids[i];
      }
    }
  }
}

TEST(Lora, IsaDoesNotMatter) {
  const TinyModel model({.hidden = 64, .intermediate = 96, .v_format = "q8_0"});
  const std::vector<Prompt> prompts = {{random_tokens(9, 50, 1), kLow}, {random_tokens(1, 50, 2), kHigh}};
  std::vector<std::vector<float>> expected;
  for (const char* isa : {"avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}) {
    const cpu::Kernels* kernels = cpu::kernels_for(isa);
    if (kernels == nullptr) continue;
    CpuRunner runner(Engine::from_bytes(model.engine_bytes(), "tiny.engine"), {2, kernels});
    runner.allocate_kv({.device_blocks = {128, 128, 128, 128}});
    runner.load_adapter(kLow, low_adapter(model));
    runner.load_adapter(kHigh, high_adapter(model));
    const auto logits = run_all(runner, prompts, 4);
    if (expected.empty()) expected = logits;
    for (std::size_t i = 0; i < prompts.size(); ++i) EXPECT_TRUE(same_bits(logits[i], expected[i])) << isa;
  }
}

TEST(Lora, AdaptersComeAndGoBetweenSteps) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2);
  const Prompt plain{random_tokens(6, 50, 1)};
  const Prompt low{plain.tokens, kLow};
  const auto bare = run_all(runner, {plain}, 8);
  EXPECT_EQ(runner.adapter_bytes(), 0);

  runner.load_adapter(kLow, low_adapter(model));
  const auto adapted = run_all(runner, {low}, 8);
  EXPECT_FALSE(same_bits(adapted[0], bare[0]));
  const std::int64_t one = runner.adapter_bytes();
  std::int64_t floats = 0;
  for (const LowRankUpdate& u : low_adapter(model).updates)
    floats += static_cast<std::int64_t>(u.a.size() + u.b.size());
  EXPECT_GE(one, 4 * floats);

  runner.load_adapter(kHigh, high_adapter(model));
  EXPECT_GT(runner.adapter_bytes(), one);
  EXPECT_EQ(run_all(runner, {low}, 8), adapted) << "another adapter of a larger rank came";
  runner.unload_adapter(kHigh);
  EXPECT_EQ(run_all(runner, {low, plain}, 8), (std::vector{adapted[0], bare[0]}));
  runner.unload_adapter(kLow);
  EXPECT_EQ(run_all(runner, {plain}, 8), bare);
  EXPECT_THROW(run_all(runner, {low}, 8), Error);
  EXPECT_EQ(run_all(runner, {plain}, 8), bare) << "the refused step left nothing behind";
}

TEST(Lora, AnAdapterWithoutUpdatesChangesNothing) {
  const TinyModel model({});
  CpuRunner runner = make_runner(model, 2);
  runner.load_adapter(1, {});
  const auto tokens = random_tokens(6, 50, 1);
  EXPECT_EQ(run_all(runner, {{tokens, 1}}, 8), run_all(runner, {{tokens, 0}}, 8));
}

TEST(Lora, StepsDoNotAllocate) {
  const TinyModel model({.bias = true, .post_norm = true});
  CpuRunner runner = make_runner(model, 2);
  runner.load_adapter(kLow, low_adapter(model));
  runner.load_adapter(kHigh, high_adapter(model));
  const auto tokens = random_tokens(40, 50, 8);
  const std::vector<BlockId> a = {0, 1, 2};
  const std::vector<BlockId> b = {3, 4, 5};
  const std::vector<SequenceStep> steps = {{tokens, 0, {a}, LogitsMode::kLast, kLow},
                                           {tokens, 0, {b}, LogitsMode::kLast, kHigh}};
  StepOutputs outputs;
  runner.step(steps, outputs);
  const auto before = testing_support::allocation_count();
  for (int i = 0; i < 3; ++i) runner.step(steps, outputs);
  EXPECT_EQ(testing_support::allocation_count(), before);
}

TEST(Lora, WhatDoesNotFitIsRefused) {
  const TinyModel model({});  // 2 layers, hidden 32, q and o 32 wide, k and v 16, gate and up 48
  CpuRunner runner = make_runner(model, 1);
  runner.load_adapter(1, low_adapter(model));
  const std::int64_t bytes = runner.adapter_bytes();
  std::mt19937 random(1);
  const LowRankUpdate good = random_update(model, 0, kK, 4, random);
  const auto changed = [&](const std::function<void(LowRankUpdate&)>& change) {
    Adapter adapter{{good}};
    change(adapter.updates[0]);
    return adapter;
  };
  const struct {
    AdapterId id;
    Adapter adapter;
    ErrorKind kind;
    const char* reason;
  } refused[] = {
      {2, changed([](auto& u) { u.layer = 2; }), ErrorKind::kInvalidRequest,
       "layers.2.k: expected a layer in [0, 2), got 2"},
      {2, changed([](auto& u) { u.layer = -1; }), ErrorKind::kInvalidRequest, "expected a layer in [0, 2), got -1"},
      {2, changed([](auto& u) { u.rank = 0; }), ErrorKind::kInvalidRequest,
       "layers.0.k: expected a rank of 1 to 256, got 0"},
      {2, changed([](auto& u) { u.rank = 257; }), ErrorKind::kInvalidRequest, "expected a rank of 1 to 256, got 257"},
      {2, changed([](auto& u) { u.in = 64; }), ErrorKind::kInvalidRequest,
       "layers.0.k A: expected shape [4, 32], got shape [4, 64]"},
      {2, changed([](auto& u) { u.module = kQ; }), ErrorKind::kInvalidRequest,
       "layers.0.q B: expected shape [32, 4], got shape [16, 4]"},
      {2, changed([](auto& u) { u.a.pop_back(); }), ErrorKind::kInvalidRequest,
       "layers.0.k A: expected 128 values for shape [4, 32], got 127"},
      {2, changed([](auto& u) { u.b.push_back(0); }), ErrorKind::kInvalidRequest,
       "layers.0.k B: expected 64 values for shape [16, 4], got 65"},
      {2, {{good, good}}, ErrorKind::kInvalidRequest, "layers.0.k: expected one update, got two"},
      {0, {{good}}, ErrorKind::kInternal, "expected an id of at least 1, got 0"},
      {1, {{good}}, ErrorKind::kInternal, "adapter 1 is loaded already"},
  };
  for (const auto& c : refused) {
    try {
      runner.load_adapter(c.id, c.adapter);
      ADD_FAILURE() << "accepted: " << c.reason;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), c.kind) << c.reason;
      EXPECT_NE(std::string(error.what()).find(c.reason), std::string::npos) << error.what();
    }
    EXPECT_EQ(runner.adapter_bytes(), bytes) << c.reason;
  }
  EXPECT_THROW(runner.unload_adapter(2), Error);
  EXPECT_THROW(runner.unload_adapter(0), Error);
  runner.load_adapter(2, {{good}});
}

TEST(Lora, LinearsThatLayersShareTakeNoUpdate) {
  const TinyModel model({});
  std::string plan = model.plan();
  const std::string own = "\"linear\": \"layers.1.o\"";
  ASSERT_NE(plan.find(own), std::string::npos);
  plan.replace(plan.find(own), own.size(), "\"linear\": \"layers.0.o\"");
  CpuRunner runner(Engine::from_bytes(model.engine_bytes(plan), "shared.engine"), {1, nullptr});
  std::mt19937 random(1);
  for (const int layer : {0, 1}) {
    EXPECT_THROW(runner.load_adapter(1, {{random_update(model, layer, kO, 4, random)}}), Error) << layer;
    runner.load_adapter(layer + 1, {{random_update(model, layer, kDown, 4, random)}});
  }
}

TEST(Lora, OfALayerWithExpertsAttentionAloneTakesUpdates) {
  const TinyModel model({.experts = 5, .top_k = 2, .dense_layer = 1});
  CpuRunner runner = make_runner(model, 2);
  std::mt19937 random(1);
  for (const AdapterModule module : {kGate, kUp, kDown}) {
    LowRankUpdate update = random_update(model, 1, module, 4, random);
    runner.load_adapter(1, {{update}});
    runner.unload_adapter(1);
    update.layer = 0;
    EXPECT_THROW(runner.load_adapter(1, {{update}}), Error) << adapter_module_name(module);
  }
  Adapter adapter;
  for (const AdapterModule module : {kQ, kK, kV, kO}) {
    adapter.updates.push_back(random_update(model, 0, module, 4, random));
  }
  runner.load_adapter(1, adapter);
  const auto tokens = random_tokens(20, model.spec.vocab, 2);
  const auto logits = run_all(runner, {{tokens, 1}}, 7)[0];
  const auto expected = NaiveModel(model, adapter).forward(tokens);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto vocab = static_cast<std::size_t>(model.spec.vocab);
    EXPECT_NEAR(logits[i], expected[i / vocab][i % vocab], 5e-5) << i;
  }
}

TEST(Lora, ModulesHaveNames) {
  for (const AdapterModule module : kAll) {
    AdapterModule parsed = module == kQ ? kDown : kQ;
    EXPECT_TRUE(parse_adapter_module(adapter_module_name(module), parsed));
    EXPECT_EQ(parsed, module);
  }
  AdapterModule unchanged = kGate;
  for (const char* name : {"", "Q", "qkv", "q_proj"}) EXPECT_FALSE(parse_adapter_module(name, unchanged)) << name;
  EXPECT_EQ(unchanged, kGate);
}

}  // namespace
}  // namespace aotllm
