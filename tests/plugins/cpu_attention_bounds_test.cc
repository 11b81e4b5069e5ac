#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "cpu_test_support.h"

namespace aotllm::cpu::test {
namespace {

/// Zeros that end where memory ends: a read behind them is a fault.
class BytesAtTheEnd {
 public:
  explicit BytesAtTheEnd(std::size_t size)
      : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), whole_((size + page_ - 1) / page_ * page_) {
    void* memory = mmap(nullptr, whole_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::uint8_t*>(memory);
    mprotect(base_ + whole_, page_, PROT_NONE);
    data_ = base_ + whole_ - size;
  }
  ~BytesAtTheEnd() { munmap(base_, whole_ + page_); }
  BytesAtTheEnd(const BytesAtTheEnd&) = delete;
  BytesAtTheEnd& operator=(const BytesAtTheEnd&) = delete;

  std::uint8_t* data() const { return data_; }

 private:
  std::size_t page_;
  std::size_t whole_;
  std::uint8_t* base_;
  std::uint8_t* data_;
};

class CpuAttentionBounds : public OnIsa {};
INSTANTIATE_ON_ISAS(CpuAttentionBounds);

TEST_P(CpuAttentionBounds, NothingBehindTheLastBlockIsRead) {
  constexpr int kTokens = 16;
  constexpr int kBlocks = 5;  // more than a tile of 64 tokens
  Random random(1);
  for (const KvType type : {KvType::kF32, KvType::kBF16, KvType::kI16, KvType::kI8}) {
    for (const int head_dim : {8, 16, 24, 40, 56, 72, 88, 120}) {
      const std::size_t bytes = kv_head_bytes(type, head_dim, kTokens);
      const BytesAtTheEnd k(kBlocks * bytes);
      const BytesAtTheEnd v(kBlocks * bytes);
      for (int t = 0; t < kBlocks * kTokens; ++t) {
        const std::vector<float> one = normal(random, static_cast<std::size_t>(head_dim));
        const std::size_t at = static_cast<std::size_t>(t / kTokens) * bytes;
        ops().store_kv(one.data(), one.data(), head_dim, type, k.data() + at, v.data() + at, t % kTokens, kTokens);
      }
      const std::int32_t table[] = {0, 1, 2, 3, 4};
      const std::vector<float> q = normal(random, static_cast<std::size_t>(3 * head_dim));
      std::vector<float> out(q.size(), NAN);
      AttentionArgs args;
      args.q = q.data();
      args.out = out.data();
      args.heads = 3;
      args.row_stride = std::ptrdiff_t{3} * head_dim;
      args.head_dim = head_dim;
      args.kv_type = type;
      args.k_base = k.data();
      args.v_base = v.data();
      args.block_stride = static_cast<std::ptrdiff_t>(bytes);
      args.block_table = table;
      args.tokens_per_block = kTokens;
      args.next = &args;
      for (const int position : {0, 15, 63, 64, kBlocks * kTokens - 1}) {
        args.position = position;
        ops().attention(args);
        for (const float value : out) ASSERT_TRUE(std::isfinite(value)) << head_dim << ", " << position;
      }
    }
  }
}

}  // namespace
}  // namespace aotllm::cpu::test
