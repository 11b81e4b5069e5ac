#include <cstdlib>
#include <string>
#include <thread>

#include "aotllm/errors.h"
#include "cpu_test_support.h"

namespace aotllm::cpu::test {
namespace {

// `kernels()` chooses once per process, so each choice is made in a process of its own.
void choose_and_exit(const char* forced) {
  if (forced == nullptr) {
    unsetenv("AOTLLM_FORCE_ISA");
  } else {
    setenv("AOTLLM_FORCE_ISA", forced, 1);
  }
  try {
    std::fprintf(stderr, "chose %s\n", kernels().isa);
  } catch (const Error& e) {
    std::fprintf(stderr, "kind %d: %s\n", static_cast<int>(e.kind()), e.what());
  }
  std::_Exit(0);
}

class CpuDispatch : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

const char* best_isa() {
  const char* best = nullptr;
  for (const char* isa : kIsas) {
    if (kernels_for(isa) != nullptr) best = isa;
  }
  return best;
}

TEST_F(CpuDispatch, ThisMachineRunsTheTests) {
  ASSERT_NE(best_isa(), nullptr) << "no kernel can run: nothing is tested";
}

TEST_F(CpuDispatch, TakesTheBestByDefault) {
  EXPECT_EXIT(choose_and_exit(nullptr), ::testing::ExitedWithCode(0), std::string("chose ") + best_isa() + "\n");
  EXPECT_EXIT(choose_and_exit(""), ::testing::ExitedWithCode(0), std::string("chose ") + best_isa() + "\n");
}

TEST_F(CpuDispatch, ForcedIsaIsTakenOrRefused) {
  for (const char* isa : kIsas) {
    const std::string expected = kernels_for(isa) != nullptr ? std::string("chose ") + isa + "\n"
                                                             : std::string("AOTLLM_FORCE_ISA=") + isa + " needs";
    EXPECT_EXIT(choose_and_exit(isa), ::testing::ExitedWithCode(0), expected);
  }
}

TEST_F(CpuDispatch, UnknownIsaIsRefusedWithTheNamesThatExist) {
  const std::string kind = "kind " + std::to_string(static_cast<int>(ErrorKind::kEngineIncompatible));
  EXPECT_EXIT(choose_and_exit("sse2"), ::testing::ExitedWithCode(0),
              kind + ": .*'sse2'.*avx2, avx512, avx512_vnni, avx512_bf16 or amx");
}

TEST_F(CpuDispatch, TablesAreCompleteAndNamed) {
  for (const char* isa : kIsas) {
    const Kernels* table = kernels_for(isa);
    if (table == nullptr) continue;
    EXPECT_STREQ(table->isa, isa);
    EXPECT_TRUE(table->rms_norm && table->quantize && table->to_bf16 && table->matmul && table->dequantize_row &&
                table->rope && table->store_kv && table->attention && table->act_mul && table->add &&
                table->add_scaled && table->softcap);
  }
  EXPECT_EQ(kernels_for("neon"), nullptr);
}

TEST_F(CpuDispatch, AnyThreadGetsTheSameTable) {
  const Kernels* seen[4] = {};
  std::thread threads[4];
  for (int i = 0; i < 4; ++i) threads[i] = std::thread([&seen, i] { seen[i] = &kernels(); });
  for (std::thread& t : threads) t.join();
  for (const Kernels* table : seen) EXPECT_EQ(table, seen[0]);
}

}  // namespace
}  // namespace aotllm::cpu::test
