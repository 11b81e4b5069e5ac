#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "decode_batch.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

void check_case(const DecodeCase& c, const DecodeBatch& batch, int sm) {
  DeviceDecodeBatch device(batch);
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

/// Results as codes are the results themselves, rounded, with a scale that makes a group's largest value the largest
/// code.
void check_codes(const DecodeCase& c, const DecodeBatch& batch) {
  DeviceDecodeBatch device(batch);
  decode_attention(device.args, Stream{});
  const std::vector<Bf16> out = device.out.download();
  const std::size_t width = static_cast<std::size_t>(batch.num_heads) * c.head_dim;
  const auto rows = static_cast<std::size_t>(batch.rows);
  DeviceArray<std::uint8_t> codes(rows * width);
  DeviceArray<float> scales(width / kCodeGroup * rows);
  codes.fill(0xFF);
  scales.fill(0xFF);
  device.out.fill(0xFF);
  device.args.codes = {codes.data(), scales.data(), batch.rows};
  decode_attention(device.args, Stream{});
  const auto got = codes.download();
  const auto got_scales = scales.download();
  const auto raw = bits(device.out.download());
  EXPECT_TRUE(std::all_of(raw.begin(), raw.end(), [](std::uint16_t value) { return value == 0xFFFF; })) << c.name;
  std::vector<bool> written(rows, false);
  for (const DecodeQuery& query : batch.queries) written[query.row] = written[query.row] || query.context > 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t row = i / width;
    const float scale = got_scales[i % width / kCodeGroup * rows + row];
    if (!written[row]) {
      ASSERT_EQ(got[i], 0xFF) << c.name << ": row " << row;
      ASSERT_TRUE(std::isnan(scale)) << c.name << ": row " << row;
      continue;
    }
    const double want = from_bf16(out[i]);
    ASSERT_NEAR(from_fp8(got[i]) * scale, want, std::abs(want) * 0.067 + scale * 0.001) << c.name << ": row " << row;
    if (i % kCodeGroup != 0) continue;
    double largest = 0.0;
    for (std::size_t at = i; at < i + kCodeGroup; ++at) {
      largest = std::max(largest, std::abs(from_bf16(out[at])));
    }
    ASSERT_NEAR(scale * kCodeMax, largest, largest * 0.005) << c.name << ": row " << row;
  }
}

/// With the kernels of SM90 and those of SM80.
void check_case(const DecodeCase& c) {
  const DecodeBatch batch(c);
  check_case(c, batch, 90);
  check_codes(c, batch);
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
  DecodeBatch batch({"", KvType::kFp8, 128, 1, 4, 64, {90}, 0});
  for (Bf16& value : batch.q) value = __float2bfloat16_rn(__bfloat162float(value) * 1e20f);  // beyond f16
  DeviceDecodeBatch device(batch);
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
    const DecodeBatch batch({"", type, 128, 2, 4, 64, {900, 1, 64, 0, 1777, 256, 257, 3000}, 256});
    DeviceDecodeBatch device(batch);
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
  const DecodeBatch batch({"", KvType::kBf16, 128, 2, 4, 64, {900, 1, 64, 0, 1777, 256}, 128});
  DeviceDecodeBatch device(batch);
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

}  // namespace
}  // namespace aotllm::cuda
