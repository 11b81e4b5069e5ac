#include "comm/communicator.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "aotllm/errors.h"
#include "elementwise/elementwise.h"
#include "elementwise_check.h"

namespace aotllm::cuda {
namespace {

/// The device of each rank: the first one or, with AOTLLM_TEST_SPREAD in the environment, all visible ones in turn.
std::vector<int> devices_of(int size) {
  int count = 1;
  if (std::getenv("AOTLLM_TEST_SPREAD") != nullptr) check(cudaGetDeviceCount(&count), "devices");
  std::vector<int> devices;
  for (int r = 0; r < size; ++r) devices.push_back(r % count);
  return devices;
}

/// While it lives, memory is made on the device of one of `size` ranks: NCCL takes no other's.
class OnDeviceOf {
 public:
  OnDeviceOf(int rank, int size) { check(cudaSetDevice(devices_of(size)[static_cast<std::size_t>(rank)]), "device"); }
  ~OnDeviceOf() { cudaSetDevice(0); }
  OnDeviceOf(const OnDeviceOf&) = delete;
  OnDeviceOf& operator=(const OnDeviceOf&) = delete;
};

/// Over peer memory or, with AOTLLM_TEST_NCCL in the environment (a path, or nothing), over NCCL.
Communicators make_ends(const std::vector<int>& devices, const CommunicatorLimits& limits) {
  const char* nccl = std::getenv("AOTLLM_TEST_NCCL");
  if (!have_peer_access(devices)) throw Error(ErrorKind::kInternal, "the tests' data is read by all devices");
  Communicators peers = make_peer_communicators(devices, limits);  // in any case, as it opens the memory
  return nccl == nullptr ? std::move(peers) : make_nccl_communicators(devices, limits, nccl);
}

/// Ranks with a stream each; their calls are made by a thread a rank, as they are at run time.
struct Ranks {
  Ranks(int size, const CommunicatorLimits& limits)
      : devices(devices_of(size)), ends(make_ends(devices, limits)), streams(ends.size()) {
    for (std::size_t r = 0; r < streams.size(); ++r) {
      check(cudaSetDevice(devices[r]), "device");
      check(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking), "stream");
    }
    check(cudaSetDevice(0), "device");
  }
  ~Ranks() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }

  int size() const { return static_cast<int>(ends.size()); }
  /// Waits for all that `work` has launched.
  void run(const std::function<void(int)>& work) {
    check(cudaDeviceSynchronize(), "data");
    std::vector<std::thread> threads;
    std::vector<std::string> failures(ends.size());
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          check(cudaSetDevice(devices[static_cast<std::size_t>(r)]), "device");
          work(r);
          check(cudaStreamSynchronize(streams[static_cast<std::size_t>(r)]), "ranks");
        } catch (const Error& error) {
          failures[static_cast<std::size_t>(r)] = error.what();
          ends[static_cast<std::size_t>(r)]->abort();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) EXPECT_EQ(failure, "");
  }
  Communicator& end(int r) { return *ends[static_cast<std::size_t>(r)]; }
  Stream stream(int r) { return {streams[static_cast<std::size_t>(r)], false}; }

  std::vector<int> devices;
  Communicators ends;
  std::vector<cudaStream_t> streams;
};

/// One sum over the ranks and what it should be.
struct Sum {
  Sum(int size, int rows_in, int width_in, bool has_bias, bool has_residual, bool in_place)
      : rows(rows_in), width(width_in), elements(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width)) {
    want.assign(elements, 0.0);
    magnitude.assign(elements, 0.0);
    for (int r = 0; r < size; ++r) add(partials.emplace_back(random_bf16(elements)));
    std::vector<Bf16> added = random_bf16(elements);
    std::vector<float> biases = random_normal(static_cast<std::size_t>(width));
    if (has_residual) add(added);
    for (std::size_t i = 0; has_bias && i < elements; ++i) {
      want[i] += biases[i % static_cast<std::size_t>(width)];
      magnitude[i] += std::abs(biases[i % static_cast<std::size_t>(width)]);
    }
    if (has_bias) bias = DeviceArray<float>(biases);
    for (int r = 0; r < size; ++r) {
      const OnDeviceOf device(r, size);
      inputs.emplace_back(partials[static_cast<std::size_t>(r)]);
      if (has_residual) residuals.emplace_back(added);
      if (!in_place) outputs.emplace_back(elements).fill(0xFF);
    }
  }

  void add(const std::vector<Bf16>& values) {
    for (std::size_t i = 0; i < elements; ++i) {
      want[i] += from_bf16(values[i]);
      magnitude[i] += std::abs(from_bf16(values[i]));
    }
  }
  /// Where there is no separate output it goes over the residual, or over the addend.
  DeviceArray<Bf16>& output(int r) {
    auto& array = !outputs.empty() ? outputs : !residuals.empty() ? residuals : inputs;
    return array[static_cast<std::size_t>(r)];
  }
  AllReduceArgs args(int r) {
    AllReduceArgs a;
    a.partial = inputs[static_cast<std::size_t>(r)].data();
    a.bias = bias.data();
    if (!residuals.empty()) a.residual = residuals[static_cast<std::size_t>(r)].data();
    a.out = output(r).data();
    a.rows = rows;
    a.width = width;
    return a;
  }
  void expect(int size, const std::string& name) {
    const std::vector<Bf16> first = output(0).download();
    Worst worst;
    for (std::size_t i = 0; i < elements; ++i) {
      const double allowed = std::abs(want[i]) * kHalfUlpBf16 + magnitude[i] * 1e-6 + 1e-30;
      worst.add(static_cast<std::int64_t>(i), from_bf16(first[i]), want[i], allowed);
    }
    worst.expect(name);
    for (int r = 1; r < size; ++r) {
      const std::vector<Bf16> other = output(r).download();
      EXPECT_EQ(std::memcmp(first.data(), other.data(), elements * sizeof(Bf16)), 0) << name << ": bits of rank " << r;
    }
  }

  int rows;
  int width;
  std::size_t elements;
  std::vector<std::vector<Bf16>> partials;
  std::vector<double> want;
  std::vector<double> magnitude;
  std::vector<DeviceArray<Bf16>> inputs;
  std::vector<DeviceArray<Bf16>> residuals;
  std::vector<DeviceArray<Bf16>> outputs;
  DeviceArray<float> bias;
};

constexpr std::size_t kMostElements = std::size_t{300} * 4096;

class Comm : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Comm, testing::Values(2, 4));

TEST_P(Comm, SumsAreRoundedOnceAndTheSameOnAllRanks) {
  AOTLLM_NEEDS_GPU();
  Ranks ranks(GetParam(), {kMostElements, 0});
  for (const auto& [rows, width] : {std::pair{1, 8}, {1, 4096}, {3, 136}, {8, 4096}, {31, 4096}, {300, 4096}}) {
    for (int options = 0; options < 8; ++options) {
      const bool bias = options & 1;
      const bool residual = options & 2;
      const bool in_place = options & 4;
      Sum sum(ranks.size(), rows, width, bias, residual, in_place);
      ranks.run([&](int r) { ranks.end(r).all_reduce(sum.args(r), ranks.stream(r)); });
      sum.expect(ranks.size(),
                 std::to_string(rows) + " x " + std::to_string(width) + ", options " + std::to_string(options));
    }
  }
}

/// An output of a norm in each of its forms.
struct Normed {
  explicit Normed(int rows, int width, bool per_block_in)
      : per_block(per_block_in),
        y(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width)),
        codes(y.size()),
        scales(per_block ? y.size() / 128 : static_cast<std::size_t>(rows)) {
    y.fill(0xFF);
    codes.fill(0xFF);
    scales.fill(0xFF);
  }
  RmsNormArgs args(const Sum& sum, const Bf16* x, const DeviceArray<float>& weight, bool fp8) {
    RmsNormArgs a{x, nullptr, weight.data(), 1e-5f, sum.rows, sum.width};
    if (fp8) {
      a.y_fp8 = codes.data();
      a.y_scales = scales.data();
      a.per_block = per_block;
    } else {
      a.y = y.data();
    }
    return a;
  }
  std::vector<double> values(bool fp8) const {
    std::vector<double> out;
    if (!fp8) {
      for (const Bf16 value : y.download()) out.push_back(from_bf16(value));
      return out;
    }
    const std::vector<float> by = scales.download();
    for (const std::uint8_t code : codes.download()) out.push_back(from_fp8(code));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] *= static_cast<double>(by[i * by.size() / out.size()]);
    return out;
  }

  bool per_block;
  DeviceArray<Bf16> y;
  DeviceArray<std::uint8_t> codes;
  DeviceArray<float> scales;
};

TEST_P(Comm, ANormTakenAlongIsThatOfTheSum) {
  AOTLLM_NEEDS_GPU();
  const int size = GetParam();
  Ranks ranks(size, {kMostElements, 0});
  for (const auto& [rows, width] : {std::pair{1, 128}, {1, 4096}, {3, 5120}, {17, 4096}, {33, 2048}, {2, 16384}}) {
    if (!ranks.end(0).takes_norm(rows, width)) GTEST_SKIP() << "not over NCCL";
    const DeviceArray<float> weight(random_normal(static_cast<std::size_t>(width)));
    for (int form = 0; form < 3; ++form) {
      const bool fp8 = form > 0;
      const std::string name = std::to_string(rows) + " x " + std::to_string(width) + ", form " + std::to_string(form);
      Sum sum(size, rows, width, false, true, true);
      std::vector<Normed> normed;
      for (int r = 0; r < size; ++r) normed.emplace_back(rows, width, form == 2);
      ranks.run([&](int r) {
        AllReduceArgs args = sum.args(r);
        const RmsNormArgs norm = normed[static_cast<std::size_t>(r)].args(sum, args.out, weight, fp8);
        args.norm = &norm;
        ranks.end(r).all_reduce(args, ranks.stream(r));
      });
      sum.expect(size, name);
      Normed want(rows, width, form == 2);
      rms_norm(want.args(sum, sum.output(0).data(), weight, fp8), Stream{});
      const std::vector<double> first = normed[0].values(fp8);
      EXPECT_LE(relative_error(first, want.values(fp8)), fp8 ? 2e-2 : 1e-3) << name;  // few fall the other way
      for (int r = 1; r < size; ++r) EXPECT_EQ(normed[static_cast<std::size_t>(r)].values(fp8), first) << name;
    }
  }
}

TEST_P(Comm, GatherPutsColumnsSideBySide) {
  AOTLLM_NEEDS_GPU();
  const int size = GetParam();
  constexpr int kMostRows = 72;
  constexpr int kMostColumns = 1024;
  Ranks ranks(size, {8, static_cast<std::size_t>(kMostRows) * kMostColumns * static_cast<std::size_t>(size)});
  for (const auto& [rows, columns] : {std::pair{1, 4}, {1, 1024}, {5, 36}, {72, 1024}}) {
    std::vector<std::vector<float>> parts;
    std::vector<DeviceArray<float>> inputs;
    for (int r = 0; r < size; ++r) {
      const OnDeviceOf device(r, size);
      parts.push_back(random_normal(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns)));
      inputs.emplace_back(parts.back());
    }
    ranks.run([&, rows = rows, columns = columns](int r) {
      ranks.end(r).gather({inputs[static_cast<std::size_t>(r)].data(), rows, columns}, ranks.stream(r));
    });
    check(cudaDeviceSynchronize(), "gather");
    std::vector<float> got(static_cast<std::size_t>(rows * columns * size));
    check(cudaMemcpy(got.data(), ranks.end(0).gathered(), got.size() * sizeof(float), cudaMemcpyDeviceToHost), "copy");
    int wrong = 0;
    for (int row = 0; row < rows; ++row) {
      for (int c = 0; c < columns * size; ++c) {
        wrong += got[static_cast<std::size_t>(row * columns * size + c)] !=
                 parts[static_cast<std::size_t>(c / columns)][static_cast<std::size_t>(row * columns + c % columns)];
      }
    }
    EXPECT_EQ(wrong, 0) << rows << " x " << columns;
    EXPECT_EQ(ranks.end(1).gathered(), nullptr);
  }
}

/// Reductions of sizes that need one block and all, one wait and two, back to back in a graph of each rank that is
/// replayed: counters, slots and flags must keep step, and nobody may overtake.
TEST_P(Comm, AThousandSumsInGraphs) {
  AOTLLM_NEEDS_GPU();
  constexpr int kReplays = 100;
  const int size = GetParam();
  Ranks ranks(size, {kMostElements, 0});
  std::vector<Sum> sums;
  for (const auto& [rows, width] : {std::pair{1, 8},
                                    {64, 4096},
                                    {1, 4096},
                                    {5, 136},
                                    {300, 4096},
                                    {2, 4096},
                                    {40, 4096},
                                    {1, 1024},
                                    {120, 4096},
                                    {16, 4096}}) {
    sums.emplace_back(size, rows, width, true, true, false);
  }
  std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(size));
  ranks.run([&](int r) {
    const Stream stream = ranks.stream(r);
    check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal), "capture");
    for (Sum& sum : sums) ranks.end(r).all_reduce(sum.args(r), stream);
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.handle, &graph), "capture");
    cudaGraphExec_t& made = graphs[static_cast<std::size_t>(r)];
    check(cudaGraphInstantiate(&made, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
    check(cudaGraphUpload(made, stream.handle), "graph");
    check(cudaStreamSynchronize(stream.handle), "graph");
    ranks.end(r).meet();
    for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(made, stream.handle), "graph");
    check(cudaStreamSynchronize(stream.handle), "graph");
  });
  for (Sum& sum : sums) sum.expect(size, std::to_string(sum.rows) + " x " + std::to_string(sum.width));
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
}

/// value = keeps ? out : 0
__global__ void hand_on(Bf16* value, const Bf16* out, int count, bool keeps) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    value[i] = keeps ? out[i] : __float2bfloat16_rn(0.0f);
  }
}

/// Each sum feeds the next one: for every row one rank has ones and the others zeros, and what it adds next is what it
/// got. A value that is read too early or too late anywhere is a wrong number at the end.
TEST_P(Comm, SumsThatFeedEachOther) {
  AOTLLM_NEEDS_GPU();
  const int size = GetParam();
  constexpr int kTurns = 500;  // of two sums: of the first rows, and of the others
  constexpr int kRows = 16;
  constexpr int kWidth = 4096;
  Ranks ranks(size, {kMostElements, 0});
  std::vector<DeviceArray<Bf16>> values;
  std::vector<DeviceArray<Bf16>> outs;
  for (int r = 0; r < size; ++r) {
    const OnDeviceOf device(r, size);
    values.emplace_back(std::vector<Bf16>(kRows * kWidth, __float2bfloat16_rn(r == 0 ? 1.0f : 0.0f)));
    outs.emplace_back(static_cast<std::size_t>(kRows * kWidth));
  }
  std::vector<cudaGraphExec_t> graphs(static_cast<std::size_t>(size));
  ranks.run([&](int r) {
    const Stream stream = ranks.stream(r);
    check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal), "capture");
    for (int turn = 0; turn < kTurns; ++turn) {
      const int split = 1 + turn % kRows;
      for (const auto& [begin, end] : {std::pair{0, split}, {split, kRows}}) {
        if (begin == end) continue;
        Bf16* value = values[static_cast<std::size_t>(r)].data() + begin * kWidth;
        Bf16* out = outs[static_cast<std::size_t>(r)].data() + begin * kWidth;
        ranks.end(r).all_reduce({value, nullptr, nullptr, out, end - begin, kWidth}, stream);
        hand_on<<<1, 1024, 0, stream.handle>>>(value, out, (end - begin) * kWidth, r == turn % size);
      }
    }
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.handle, &graph), "capture");
    cudaGraphExec_t& made = graphs[static_cast<std::size_t>(r)];
    check(cudaGraphInstantiate(&made, graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
    check(cudaGraphUpload(made, stream.handle), "graph");
    check(cudaStreamSynchronize(stream.handle), "graph");
    ranks.end(r).meet();
    check(cudaGraphLaunch(made, stream.handle), "graph");
    check(cudaStreamSynchronize(stream.handle), "graph");
  });
  for (int r = 0; r < size; ++r) {
    int wrong = 0;
    for (const Bf16 value : outs[static_cast<std::size_t>(r)].download()) wrong += from_bf16(value) != 1.0;
    EXPECT_EQ(wrong, 0) << "rank " << r;
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
}

TEST_P(Comm, ARankThatFailsFreesTheOthers) {
  AOTLLM_NEEDS_GPU();
  const int size = GetParam();
  Ranks ranks(size, {4096, 0});
  Sum sum(size, 1, 4096, false, false, false);
  std::vector<int> refused(static_cast<std::size_t>(size), 0);
  ranks.run([&](int r) {
    if (r == 0) return ranks.end(r).abort();
    try {
      ranks.end(r).all_reduce(sum.args(r), ranks.stream(r));
    } catch (const Error&) {
      refused[static_cast<std::size_t>(r)] = 1;
    }
  });
  if (ranks.end(0).shares_device()) {
    EXPECT_EQ(std::count(refused.begin(), refused.end(), 1), size - 1);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace aotllm::cuda
