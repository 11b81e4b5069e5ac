#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>

#include "attention/attention.h"
#include "reference.h"

namespace aotllm::cuda {
namespace {

struct Sequence {
  int position;  ///< of its first query
  int length;    ///< queries
};

struct Case {
  int head_dim = 128;
  int num_heads = 4;
  int num_kv_heads = 1;
  int tokens_per_block = 64;
  KvType type = KvType::kBf16;
  std::vector<Sequence> sequences;
  int window = 0;
  float softcap = 0.0f;
  int tile_rows = kContextTileRows;
  bool share = false;  ///< sequences share the blocks that hold [0, position) of all
  float sigma = 1.0f;
  int sm = 90;  ///< of the kernels
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "d" << c.head_dim << " h" << c.num_heads << "/" << c.num_kv_heads << " block " << c.tokens_per_block
      << (c.type == KvType::kFp8 ? " fp8" : " bf16") << " window " << c.window << " softcap " << c.softcap
      << " tiles of " << c.tile_rows << " sm " << c.sm << " sequences";
  for (const Sequence& s : c.sequences) out << " " << s.position << "+" << s.length;
  return out;
}

/// A pool with the keys and values of a case: everything unwritten, in blocks and between them, is NaN, and entries of
/// the block table that no query may use are out of range.
class Problem {
 public:
  explicit Problem(const Case& c) : c_(c) {
    const int tokens = c.tokens_per_block;
    int longest = 0;
    for (const Sequence& s : c.sequences) longest = std::max(longest, s.position + s.length);
    table_stride_ = (longest + tokens - 1) / tokens + 3;
    const int shared_blocks = c.share ? c.sequences[0].position / tokens : 0;
    int used = shared_blocks;
    for (const Sequence& s : c.sequences) used += (s.position + s.length + tokens - 1) / tokens - shared_blocks;
    num_blocks_ = used + 5;
    std::vector<int> order(static_cast<std::size_t>(num_blocks_));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_engine());

    const std::size_t elements = element_bytes(c.type);
    const std::size_t block_bytes = 2 * elements * static_cast<std::size_t>(c.num_kv_heads * tokens * c.head_dim);
    stride_ = block_bytes + 256;
    pool_.assign(stride_ * static_cast<std::size_t>(num_blocks_), 0xFF);  // NaN in both types
    table_.assign(c.sequences.size() * static_cast<std::size_t>(table_stride_), 1 << 30);
    std::size_t next = static_cast<std::size_t>(shared_blocks);
    for (std::size_t s = 0; s < c.sequences.size(); ++s) {
      const int context = c.sequences[s].position + c.sequences[s].length;
      for (int b = 0; b * tokens < context; ++b) {
        const bool is_shared = b < shared_blocks;
        const int block = is_shared ? order[static_cast<std::size_t>(b)] : order[next++];
        // Entries that lie before all windows are stale.
        const int first_seen = c.window > 0 ? std::max(0, c.sequences[s].position - c.window + 1) : 0;
        const bool stale = (b + 1) * tokens <= first_seen;
        table_[s * static_cast<std::size_t>(table_stride_) + static_cast<std::size_t>(b)] = stale ? -7 : block;
        if (!is_shared || s == 0) fill_block(block, std::min(tokens, context - b * tokens));
      }
    }
    for (std::size_t s = 0; s < c.sequences.size(); ++s) m_ += c.sequences[s].length;
    q_ = random_bf16(static_cast<std::size_t>(m_ * c.num_heads * c.head_dim), c.sigma);
    cut(c.tile_rows);
  }

  /// Makes the tiles anew, of up to `tile_rows` queries.
  void cut(int tile_rows) {
    tiles_.clear();
    int row = 0;
    for (std::size_t s = 0; s < c_.sequences.size(); ++s) {
      for (int i = 0; i < c_.sequences[s].length; i += tile_rows) {
        const int rows = std::min(tile_rows, c_.sequences[s].length - i);
        tiles_.push_back({row + i, rows, static_cast<int>(s), c_.sequences[s].position + i});
      }
      row += c_.sequences[s].length;
    }
    std::stable_sort(tiles_.begin(), tiles_.end(), [](const ContextTile& a, const ContextTile& b) {
      return a.position + a.rows > b.position + b.rows;
    });
    tiles_.insert(tiles_.begin() + 1, ContextTile{});  // padding
    tiles_.push_back(ContextTile{});
  }

  /// Rows behind m stay as they were.
  std::vector<Bf16> run(bool programmatic = false) const {
    DeviceArray<Bf16> q(q_);
    DeviceArray<std::uint8_t> pool(pool_);
    DeviceArray<std::int32_t> table(table_);
    DeviceArray<ContextTile> tiles(tiles_);
    DeviceArray<Bf16> out(q_.size() + static_cast<std::size_t>(kGuardRows * c_.num_heads * c_.head_dim));
    out.fill(0xFF);
    ContextAttentionArgs args;
    args.q = q.data();
    args.out = out.data();
    args.num_heads = c_.num_heads;
    args.scale = scale();
    args.softcap = c_.softcap;
    args.window = c_.window;
    args.kv = {c_.type,     pool.data(),         stride_,      num_blocks_,  c_.num_kv_heads,
               c_.head_dim, c_.tokens_per_block, table.data(), table_stride_};
    args.tiles = tiles.data();
    args.num_tiles = static_cast<int>(tiles_.size());
    args.m = m_;
    context_attention(args, {nullptr, programmatic, c_.sm});
    return out.download();
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c_.head_dim)); }

  /// Attention of a row in float64.
  std::vector<double> reference(int row, int head) const {
    std::size_t s = 0;
    int local = row;
    while (local >= c_.sequences[s].length) local -= c_.sequences[s++].length;
    const int position = c_.sequences[s].position + local;
    const int first = c_.window > 0 ? std::max(0, position - c_.window + 1) : 0;
    const int kv_head = head / (c_.num_heads / c_.num_kv_heads);
    std::vector<double> scores;
    for (int key = first; key <= position; ++key) {
      double dot = 0.0;
      for (int d = 0; d < c_.head_dim; ++d) dot += from_bf16(query(row, head, d)) * cached(s, 0, kv_head, key, d);
      dot *= scale();
      scores.push_back(c_.softcap > 0.0f ? c_.softcap * std::tanh(dot / c_.softcap) : dot);
    }
    const double maximum = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    std::vector<double> out(static_cast<std::size_t>(c_.head_dim), 0.0);
    for (int key = first; key <= position; ++key) {
      const double weight = std::exp(scores[static_cast<std::size_t>(key - first)] - maximum);
      sum += weight;
      for (int d = 0; d < c_.head_dim; ++d) out[static_cast<std::size_t>(d)] += weight * cached(s, 1, kv_head, key, d);
    }
    for (double& value : out) value /= sum;
    return out;
  }

  int m() const { return m_; }
  static constexpr int kGuardRows = 130;

 private:
  Bf16 query(int row, int head, int d) const {
    return q_[static_cast<std::size_t>((row * c_.num_heads + head) * c_.head_dim + d)];
  }

  std::size_t offset(int block, int kv, int head, int token, int d) const {
    const int index = ((kv * c_.num_kv_heads + head) * c_.tokens_per_block + token) * c_.head_dim + d;
    return static_cast<std::size_t>(block) * stride_ + static_cast<std::size_t>(index) * element_bytes(c_.type);
  }

  void fill_block(int block, int tokens) {
    for (int kv = 0; kv < 2; ++kv) {
      for (int head = 0; head < c_.num_kv_heads; ++head) {
        const auto size = static_cast<std::size_t>(tokens * c_.head_dim);
        const std::vector<float> values = random_normal(size, c_.sigma);
        std::uint8_t* to = &pool_[offset(block, kv, head, 0, 0)];
        if (c_.type == KvType::kBf16) {
          std::memcpy(to, to_bf16(values).data(), size * 2);
        } else {
          std::memcpy(to, to_fp8(values).data(), size);
        }
      }
    }
  }

  double cached(std::size_t sequence, int kv, int head, int position, int d) const {
    const int block = table_[sequence * static_cast<std::size_t>(table_stride_) +
                             static_cast<std::size_t>(position / c_.tokens_per_block)];
    const std::uint8_t* from = &pool_[offset(block, kv, head, position % c_.tokens_per_block, d)];
    if (c_.type == KvType::kFp8) return from_fp8(*from);
    Bf16 value;
    std::memcpy(&value, from, 2);
    return from_bf16(value);
  }

  Case c_;
  int table_stride_ = 0;
  int num_blocks_ = 0;
  int m_ = 0;
  std::size_t stride_ = 0;
  std::vector<std::uint8_t> pool_;
  std::vector<std::int32_t> table_;
  std::vector<Bf16> q_;
  std::vector<ContextTile> tiles_;
};

/// The first and last rows of tiles and blocks, and some between.
std::vector<int> rows_to_check(int m) {
  std::vector<int> rows;
  for (int row : {0, 1, 7, 8, 15, 16, 63, 64, 65, 127, 128, 129, 255, 256, m - 2, m - 1}) {
    if (row >= 0 && row < m) rows.push_back(row);
  }
  std::uniform_int_distribution<int> any(0, m - 1);
  for (int i = 0; i < 8; ++i) rows.push_back(any(random_engine()));
  return rows;
}

/// Checks rows of a result and prints what to look at.
void check_rows(const Case& c, const Problem& problem, const std::vector<Bf16>& out, double limit) {
  const int width = c.num_heads * c.head_dim;
  double worst = 0.0;
  double worst_absolute = 0.0;
  std::string bad;
  int bad_rows = 0;
  std::vector<int> heads{0, c.num_heads - 1, c.num_heads / 2};
  for (int row : rows_to_check(problem.m())) {
    for (int head : heads) {
      const std::vector<double> want = problem.reference(row, head);
      std::vector<double> got;
      double absolute = 0.0;
      int at = 0;
      for (int d = 0; d < c.head_dim; ++d) {
        got.push_back(from_bf16(out[static_cast<std::size_t>(row * width + head * c.head_dim + d)]));
        const double difference = std::abs(got.back() - want[static_cast<std::size_t>(d)]);
        if (!(difference <= absolute)) {
          absolute = difference;
          at = d;
        }
      }
      const double error = relative_error(got, want);
      worst = std::max(worst, error);
      worst_absolute = std::max(worst_absolute, absolute);
      if (!(error <= limit) && bad_rows++ < 3) {
        bad += " [row " + std::to_string(row) + " head " + std::to_string(head) + " d " + std::to_string(at) + " got " +
               std::to_string(got[static_cast<std::size_t>(at)]) + " want " +
               std::to_string(want[static_cast<std::size_t>(at)]) + " error " + std::to_string(error) + "]";
      }
    }
  }
  std::size_t unwritten = 0;
  std::size_t written = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, &out[i], 2);
    const bool inside = i < static_cast<std::size_t>(problem.m() * width);
    if (inside && (bits & 0x7fff) > 0x7f80) ++unwritten;
    if (!inside && bits != 0xffff) ++written;
  }
  EXPECT_EQ(bad, "") << c << ": " << bad_rows << " rows differ";
  EXPECT_EQ(unwritten, 0u) << c << ": NaN in rows of the result";
  EXPECT_EQ(written, 0u) << c << ": written behind the last row";
  if (bad_rows > 0 || unwritten > 0 || written > 0) {
    std::printf("FAIL relative %.2e absolute %.2e bad %d NaN %zu beyond %zu\n", worst, worst_absolute, bad_rows,
                unwritten, written);
  }
  static double worst_of_all = 0.0;
  if (worst > worst_of_all && bad_rows == 0) {
    worst_of_all = worst;
    std::printf("worst so far %.2e (absolute %.2e)\n", worst, worst_absolute);
  }
}

class ContextAttention : public ::testing::TestWithParam<Case> {};

TEST_P(ContextAttention, MatchesFloat64) {
  AOTLLM_NEEDS_GPU();
  const Case c = GetParam();
  const Problem problem(c);
  const std::vector<Bf16> out = problem.run();
  check_rows(c, problem, out, 1.2e-2);
  const std::vector<Bf16> again = problem.run(c.sm >= 90);
  EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(Bf16)), 0) << c << ": two runs differ";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<Sequence> ragged{{0, 1}, {0, 130}, {100, 77}, {64, 64}, {0, 300}, {517, 129}};
  for (int head_dim : {64, 96, 128, 256}) {
    for (KvType type : {KvType::kBf16, KvType::kFp8}) {
      for (int tokens : {16, 32, 64, 128}) {
        all.push_back({.head_dim = head_dim, .tokens_per_block = tokens, .type = type, .sequences = ragged});
      }
      const Case base{.head_dim = head_dim, .num_heads = 8, .num_kv_heads = 2, .type = type};
      const auto add = [&](auto change) {
        all.push_back(base);
        change(all.back());
      };
      add([](Case& c) { c.sequences = {{0, 1}}; });
      add([](Case& c) { c.sequences = {{1000, 1}}; });
      add([](Case& c) { c.sequences = {{0, 128}}; });
      add([](Case& c) { c.sequences = {{1333, 700}}, c.sigma = 3.0f; });
      add([](Case& c) { c.sequences = {{0, 513}, {0, 31}}, c.num_heads = 8, c.num_kv_heads = 8; });
      add([](Case& c) { c.sequences = {{0, 257}, {200, 100}}, c.num_heads = 6, c.num_kv_heads = 2; });
      add([](Case& c) { c.sequences = {{0, 257}}, c.num_heads = 8, c.num_kv_heads = 1, c.tokens_per_block = 16; });
      add([](Case& c) { c.sequences = {{384, 65}, {384, 130}, {384, 7}}, c.share = true; });
      add([](Case& c) { c.sequences = {{0, 400}, {777, 300}}, c.window = 100; });
      add([](Case& c) { c.sequences = {{0, 400}, {777, 300}}, c.window = 1, c.tokens_per_block = 16; });
      add([](Case& c) { c.sequences = {{0, 400}, {1111, 200}}, c.window = 512, c.tokens_per_block = 32; });
      add([](Case& c) { c.sequences = {{0, 300}, {333, 200}}, c.softcap = 20.0f, c.sigma = 2.0f; });
      add([](Case& c) { c.sequences = {{0, 300}, {333, 200}}, c.softcap = 50.0f, c.window = 130, c.sigma = 2.0f; });
      add([](Case& c) { c.sequences = {{5, 250}}, c.tile_rows = 50; });
    }
  }
  for (std::size_t i = 0, of_sm90 = all.size(); i < of_sm90; ++i) {
    if (all[i].type != KvType::kBf16) continue;
    all.push_back(all[i]);
    all.back().sm = 80;
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, ContextAttention, ::testing::ValuesIn(cases()));

/// Many items for each block of the grid, some of them padding.
TEST(ContextAttentionSchedule, ManySequences) {
  AOTLLM_NEEDS_GPU();
  Case c{.head_dim = 64, .num_heads = 16, .num_kv_heads = 4, .tokens_per_block = 32};
  std::uniform_int_distribution<int> length(1, 260);
  for (int i = 0; i < 60; ++i)
    c.sequences.push_back({i % 3 == 0 ? length(random_engine()) : 0, length(random_engine())});
  for (c.sm = 80; c.sm <= 90; c.sm += 10) {
    const Problem problem(c);
    check_rows(c, problem, problem.run(), 1.2e-2);
  }
}

/// Bits of a row do not depend on how a prompt is cut into chunks and tiles.
TEST(ContextAttentionSchedule, BitsDoNotDependOnTiles) {
  AOTLLM_NEEDS_GPU();
  for (int head_dim : {64, 128, 256}) {
    for (int window : {0, 1, 24, 100, 200}) {  // those that are masked in whole steps of some tiles, too
      for (int sm : {80, 90}) {
        Case c{.head_dim = head_dim, .sequences = {{0, 700}}, .window = window, .sm = sm};
        Problem whole(c);
        const std::vector<Bf16> out = whole.run();
        for (int rows : {37, 5}) {
          whole.cut(rows);
          const std::vector<Bf16> cut = whole.run();
          EXPECT_EQ(std::memcmp(out.data(), cut.data(), out.size() * sizeof(Bf16)), 0) << c << " cut to " << rows;
        }
      }
    }
  }
}

}  // namespace
}  // namespace aotllm::cuda
