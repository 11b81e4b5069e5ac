#include <cstdio>
#include <random>
#include <vector>

#include "device_array.h"
#include "sampling/sampling.h"
#include "timing.h"

// Sampling of rows of 128,256 logits that come from memory.
namespace aotllm::cuda {
namespace {

constexpr int kVocab = 128256;
constexpr int kRows = 768;  // 394 MB
constexpr double kReadLimit = 4265e9;

class Bench {
 public:
  explicit Bench(float sigma) : logits_(static_cast<std::size_t>(kRows) * kVocab), tokens_(kRows) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal(0.0F, sigma);
    std::vector<float> some(std::size_t{16} * kVocab);
    for (float& value : some) value = normal(engine);
    for (int row = 0; row < kRows; row += 16) {  // each 16 rows are others, in part
      check(cudaMemcpy(logits_.data() + static_cast<std::size_t>(row) * kVocab, some.data(),
                       some.size() * sizeof(float), cudaMemcpyHostToDevice),
            "copy");
      std::swap(some[row], some[some.size() - 1 - row]);
    }
  }

  template <class Run>
  void time(const char* name, int rows, const RowSampling& sampling, const Run& run) {
    std::vector<RowSampling> params(kRows, sampling);
    for (int i = 0; i < kRows; ++i) {
      params[i].seed = 1;
      params[i].position = i;
    }
    const DeviceArray<RowSampling> on_device(params);
    const int calls = rows >= 256 ? 6 : rows >= 64 ? 24 : 96;
    const double seconds = time_in_graph(calls, [&](int i, const Stream& stream) {
      const std::size_t first = static_cast<std::size_t>(i) * rows % kRows;
      SamplingArgs args;
      args.logits = logits_.data() + first * kVocab;
      args.vocab_size = kVocab;
      args.num_rows = rows;
      args.params = on_device.data() + first;
      args.tokens = tokens_.data() + first;
      run(args, stream);
    });
    const double bytes = static_cast<double>(rows) * kVocab * sizeof(float);
    std::printf("%-28s %4d rows %8.2f us %7.0f GB/s  %5.1f %%\n", name, rows, seconds * 1e6, bytes / seconds * 1e-9,
                100.0 * bytes / seconds / kReadLimit);
  }

  void time_logprobs(int rows, int num_top) {
    DeviceArray<double> logprobs(kRows);
    DeviceArray<std::int32_t> ids(static_cast<std::size_t>(kRows) * 20);
    DeviceArray<double> tops(static_cast<std::size_t>(kRows) * 20);
    check(cudaMemset(tokens_.data(), 0, tokens_.bytes()), "memset");
    time("row_logprobs", rows, {}, [&](const SamplingArgs& args, const Stream& stream) {
      row_logprobs({args.logits, kVocab, rows, nullptr, args.tokens, num_top, logprobs.data(), ids.data(), tops.data()},
                   stream);
    });
  }

 private:
  DeviceArray<float> logits_;
  DeviceArray<std::int32_t> tokens_;
};

void bench_all(float sigma) {
  std::printf("logits of a standard deviation of %.1f\n", sigma);
  Bench bench(sigma);
  for (const int rows : {1, 16, 64, 256}) {
    bench.time("greedy", rows, {}, sample_greedy);
    if (rows == 16) continue;
    bench.time("any, greedy", rows, {}, sample);
    bench.time("any, temperature 1", rows, {.temperature = 1.0F}, sample);
    bench.time("any, min_p 0.05", rows, {.temperature = 1.0F, .min_p = 0.05F}, sample);
    bench.time("any, top_k 50", rows, {.temperature = 1.0F, .top_k = 50}, sample);
    bench.time("any, top_p 0.9", rows, {.temperature = 1.0F, .top_p = 0.9F}, sample);
    bench.time("any, top_k 50, top_p 0.9", rows, {.temperature = 0.8F, .top_k = 50, .top_p = 0.9F}, sample);
    bench.time_logprobs(rows, 20);
  }
}

}  // namespace
}  // namespace aotllm::cuda

int main() {
  aotllm::cuda::bench_all(3.0F);
  aotllm::cuda::bench_all(1.0F);
}
