#include "sampling/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>

namespace aotllm {
namespace {

// The published test vectors of Philox4x32-10 (Random123, kat_vectors).
TEST(Philox, MatchesThePublishedVectors) {
  using Four = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}), (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, DrawsDifferBySeedPositionAndSequence) {
  const std::set<double> draws = {uniform_draw(0, 0, 0), uniform_draw(1, 0, 0),
                                  uniform_draw(std::uint64_t{1} << 32, 0, 0), uniform_draw(0, 1, 0),
                                  uniform_draw(0, 0, 1)};
  EXPECT_EQ(draws.size(), 5U);
  for (const double draw : draws) {
    EXPECT_GE(draw, 0.0);
    EXPECT_LT(draw, 1.0);
  }
}

}  // namespace
}  // namespace aotllm
