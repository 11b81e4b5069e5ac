#include "support/cpu_topology.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace aotllm {
namespace {

namespace fs = std::filesystem;

TEST(CpuTopology, ParsesCpuMax) {
  EXPECT_EQ(parse_cpu_max("200000 100000\n"), 2);
  EXPECT_EQ(parse_cpu_max("150000 100000\n"), 2) << "rounded up";
  EXPECT_EQ(parse_cpu_max("1000 100000\n"), 1) << "at least 1";
  EXPECT_EQ(parse_cpu_max("max 100000\n"), std::nullopt);
  for (const char* text : {"", "max", "200000", "200000 0", "-1 100000", "0 100000", "x y"}) {
    EXPECT_EQ(parse_cpu_max(text), std::nullopt) << text;
  }
}

TEST(CpuTopology, ParsesCfsQuota) {
  EXPECT_EQ(parse_cfs_quota("250000\n", "100000\n"), 3);
  EXPECT_EQ(parse_cfs_quota("-1\n", "100000\n"), std::nullopt);
}

class CgroupTree : public testing::Test {
 protected:
  void SetUp() override { fs::remove_all(root_); }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_ = fs::path(testing::TempDir()) / ("aotllm_cgroup_" + std::to_string(::getpid()));
};

TEST_F(CgroupTree, TakesTheSmallestOfV2Ancestors) {
  write("cpu.max", "max 100000");
  write("pod/cpu.max", "300000 100000");
  write("pod/app/cpu.max", "800000 100000");
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), "0::/pod/app\n"), 3);
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), "0::/\n"), std::nullopt);
}

TEST_F(CgroupTree, ReadsV1) {
  write("cpu/job/cpu.cfs_quota_us", "400000\n");
  write("cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), "5:memory:/job\n4:cpu,cpuacct:/job\n"), 4);
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), "4:cpuset:/job\n"), std::nullopt);
}

TEST_F(CgroupTree, NothingThereIsNoLimit) {
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), ""), std::nullopt);
  EXPECT_EQ(cgroup_cpu_limit(root_.string(), "0::/gone\nnonsense\n"), std::nullopt);
}

TEST(CpuTopology, DefaultIsAtLeastOne) {
  EXPECT_GE(default_num_threads(), 1);
}

}  // namespace
}  // namespace aotllm
