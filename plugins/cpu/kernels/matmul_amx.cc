#if defined(__AMX_BF16__)

#include "kernels/ops.h"
#include "kernels/simd.h"

// The matmul of bf16 weights by AMX, for any number of rows. Per 32 columns TDPBF16PS makes two chains from zero, over
// even and over odd columns in ascending order, adds them, and adds that to the sum; each step is rounded to nearest
// even, subnormal inputs and results are zeros (Intel SDM volume 2, TDPBF16PS). That is another order than that of the
// other ISAs, and the same for every row count, so that rows do not depend on each other here either.

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

constexpr int kTileRows = 16;
constexpr int kLineBytes = 64;
/// Lines of a panel in a tile of weights: 16 pairs of columns.
constexpr int kStepBytes = kTileRows * kLineBytes;

/// Operand of LDTILECFG.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t column_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums [rows, 16], 4 and 5 activations [rows, 32], 6 and 7 weights [16 pairs, 16].
constexpr int kRowTile = 4;
constexpr int kSecondRowTile = 5;

/// What is at `p` is read by an instruction of which the compiler does not know that it reads memory.
inline void publish(const void* p) {
  __asm__ volatile("" : : "r"(p) : "memory");
}

void load(const TileConfig& config) {
  publish(&config);
  _tile_loadconfig(&config);
}

/// Tiles for up to 16 rows, beside them 4 panels.
void configure_rows(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = kLineBytes;
    config.rows[t] = static_cast<std::uint8_t>(t <= kRowTile ? rows : kTileRows);
  }
  load(config);
}

/// Tiles for 16 rows and up to 16 more, beside them 2 panels: sums 0 and 1 are of the first rows.
void configure_two(int second_rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = kLineBytes;
    const bool is_second = t == 2 || t == 3 || t == kSecondRowTile;
    config.rows[t] = static_cast<std::uint8_t>(is_second ? second_rows : kTileRows);
  }
  load(config);
}

/// Weights of a step; the last one may be short, then zeros follow.
struct Steps {
  int whole;
  int rest_lines;

  explicit Steps(int k) : whole((k + 1) / 2 / kTileRows), rest_lines((k + 1) / 2 % kTileRows) {}
};

struct Place {
  const std::uint8_t* panel;
  std::size_t panel_stride;  ///< bytes
  const std::uint16_t* x;    ///< of the first row
  std::ptrdiff_t x_stride;   ///< values
  float* y;
  std::ptrdiff_t y_stride;
};

const std::uint8_t* padded(const std::uint8_t* lines, int count, std::uint8_t* to) {
  for (int i = 0; i < kTileRows; ++i) {
    const I32x16 line = i < count ? load_i32(lines + i * kLineBytes) : set1_i32(0);
    _mm512_store_si512(to + i * kLineBytes, line.v);
  }
  publish(to);
  return to;
}

/// Calls add(x, w) for each step of k: the activations of the first row, and the weights of P panels.
template <int P, class Add>
inline void for_each_step(const Place& at, int k, Add&& add) {
  const Steps steps(k);
  const std::uint8_t* w[P];
  for (int p = 0; p < P; ++p) w[p] = at.panel + at.panel_stride * static_cast<std::size_t>(p);
  const std::uint16_t* x = at.x;
  for (int i = 0; i < steps.whole; ++i, x += kBf16Line) {
    add(x, w);
    for (int p = 0; p < P; ++p) w[p] += kStepBytes;
  }
  alignas(64) std::uint8_t rest[P][kStepBytes];
  if (steps.rest_lines > 0) {
    for (int p = 0; p < P; ++p) w[p] = padded(w[p], steps.rest_lines, rest[p]);
    add(x, w);
  }
}

/// P panels of up to 16 rows.
template <int P>
void rows_tile(const Place& at, int k) {
  _tile_zero(0);
  if constexpr (P > 1) _tile_zero(1);
  if constexpr (P > 2) _tile_zero(2);
  if constexpr (P > 3) _tile_zero(3);
  const auto add = [&](const std::uint16_t* x, const std::uint8_t* const(&w)[P]) {
    _tile_loadd(4, x, at.x_stride * 2);
    _tile_loadd(6, w[0], kLineBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (P > 1) {
      _tile_loadd(7, w[1], kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (P > 2) {
      _tile_loadd(6, w[2], kLineBytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (P > 3) {
      _tile_loadd(7, w[3], kLineBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
  };
  for_each_step<P>(at, k, add);
  _tile_stored(0, at.y, at.y_stride * 4);
  if constexpr (P > 1) _tile_stored(1, at.y + kPanelRows, at.y_stride * 4);
  if constexpr (P > 2) _tile_stored(2, at.y + 2 * kPanelRows, at.y_stride * 4);
  if constexpr (P > 3) _tile_stored(3, at.y + 3 * kPanelRows, at.y_stride * 4);
}

/// P panels of 17 to 32 rows: each tile of weights serves two of rows.
template <int P>
void two_tiles(const Place& at, int k) {
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (P > 1) {
    _tile_zero(1);
    _tile_zero(3);
  }
  const std::ptrdiff_t second = kTileRows * at.x_stride;
  const auto add = [&](const std::uint16_t* x, const std::uint8_t* const(&w)[P]) {
    _tile_loadd(4, x, at.x_stride * 2);
    _tile_loadd(6, w[0], kLineBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + second, at.x_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (P > 1) {
      _tile_loadd(7, w[1], kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  };
  for_each_step<P>(at, k, add);
  _tile_stored(0, at.y, at.y_stride * 4);
  _tile_stored(2, at.y + kTileRows * at.y_stride, at.y_stride * 4);
  if constexpr (P > 1) {
    _tile_stored(1, at.y + kPanelRows, at.y_stride * 4);
    _tile_stored(3, at.y + kTileRows * at.y_stride + kPanelRows, at.y_stride * 4);
  }
}

/// Calls part(first panel, panels) for the panels of a row block, `most` at a time.
template <int Most, class Part>
void in_parts(int panels, Part&& part) {
  int p = 0;
  for (; p + Most <= panels; p += Most) part.template operator()<Most>(p);
  if constexpr (Most > 2) {
    if (p + 2 <= panels) {
      part.template operator()<2>(p);
      p += 2;
    }
  }
  if (p < panels) part.template operator()<1>(p);
}

/// Up to 32 rows of `panels` panels, all of whose 16 rows are stored.
void row_block(const Place& at, int k, int rows, int panels) {
  const auto from = [&](int p) {
    Place place = at;
    place.panel += at.panel_stride * static_cast<std::size_t>(p);
    place.y += p * kPanelRows;
    return place;
  };
  if (rows <= kTileRows) {
    configure_rows(rows);
    in_parts<4>(panels, [&]<int P>(int p) { rows_tile<P>(from(p), k); });
  } else {
    configure_two(rows - kTileRows);
    in_parts<2>(panels, [&]<int P>(int p) { two_tiles<P>(from(p), k); });
  }
}

}  // namespace

void matmul_bf16(const Segment& w, const Activations& a, int rows, int panel_begin, int panel_end, float* y,
                 std::ptrdiff_t y_stride) {
  constexpr int kBlockRows = 2 * kTileRows;
  const std::size_t stride = panel_bytes(w.format, w.k);
  const std::ptrdiff_t x_stride = bf16_stride(w.k);
  const int last_lanes = w.n - (panel_end - 1) * kPanelRows;
  const int direct = panel_end - panel_begin - (last_lanes < kPanelRows ? 1 : 0);  // panels that are whole
  for (int row = 0; row < rows; row += kBlockRows) {
    const int count = rows - row < kBlockRows ? rows - row : kBlockRows;
    Place at{w.panels + stride * static_cast<std::size_t>(panel_begin),
             stride,
             a.bf16 + row * x_stride,
             x_stride,
             y + row * y_stride,
             y_stride};
    // Panels in groups that stay in L2 would pay off beyond 32 rows only, which callers do not ask for.
    row_block(at, w.k, count, direct);
    if (last_lanes >= kPanelRows) continue;
    alignas(64) float last[kBlockRows * kPanelRows];
    at.panel += stride * static_cast<std::size_t>(direct);
    at.y = last;
    at.y_stride = kPanelRows;
    row_block(at, w.k, count, 1);
    float* out = y + row * y_stride + direct * kPanelRows;
    for (int r = 0; r < count; ++r) store_lanes(out + r * y_stride, load(last + r * kPanelRows), last_lanes);
  }
  _tile_release();
}

}  // namespace aotllm::cpu::AOTLLM_ISA

#endif
