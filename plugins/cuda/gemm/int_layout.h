#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/gemm.h"

// How matrices of kInt8 and kInt4 lie in memory (docs/engine_format.md, "Integer formats"): blocks of 64 rows × 128
// columns one after the other, those of the same rows first in order of k; in a block the codes stand in the order in
// which the threads of a warpgroup multiply them. Rows and columns beyond the matrix are padding.
namespace aotllm::cuda {

inline constexpr int kIntRows = 64;
inline constexpr int kIntColumns = 128;

constexpr bool has_integers(WeightType type) {
  return type == WeightType::kInt8 || type == WeightType::kInt4;
}

/// Four kinds of matrices, each with kernels of its own.
enum class IntFormat : std::uint8_t {
  kInt4Group128,  ///< codes 0 … 15, a scale and a zero for each row and 128 columns
  kInt4Group32,   ///< likewise, for each 32 columns
  kInt8Row,       ///< signed codes, a scale per row [n]
  kInt8Group32,   ///< codes − 128, a scale and a zero (0 … 255) for each row and 32 columns
};

constexpr bool int_has_four_bits(IntFormat format) {
  return format == IntFormat::kInt4Group128 || format == IntFormat::kInt4Group32;
}
/// Groups of a row of a block; 0 where the whole row has one scale.
constexpr int int_groups(IntFormat format) {
  return format == IntFormat::kInt8Row ? 0 : format == IntFormat::kInt4Group128 ? 1 : 4;
}
constexpr int int_block_bytes(IntFormat format) {
  return kIntRows * kIntColumns / (int_has_four_bits(format) ? 2 : 1);
}

/// Where code (row, column) of a block lies.
struct IntPlace {
  int byte;
  int shift;  ///< of the bits in the byte: 0 or 4
};

/// Thread t = 32 · (row / 16) + 4 · (row mod 8) + column / 2 mod 4 of a warpgroup takes rows r and r + 8, of each 16
/// columns the four c, c + 1, c + 8, c + 9 (c = 2 (t mod 4)): 16 bytes of it stand together.
constexpr IntPlace int_place(bool four_bits, int row, int column) {
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  const int step = column / 16;       // of the tensor cores
  const int lower = row / 8 % 2;      // whether it is row r + 8
  const int right = column % 16 / 8;  // whether it is column c + 8 or c + 9
  const int odd = column % 2;
  if (four_bits) {  // a word a step: nibbles 0 … 3 are of column c (rows r, r + 8), then of c + 8; 4 … 7 of c + 1, c +
                    // 9
    const int nibble = 4 * odd + 2 * right + lower;
    return {step / 4 * 2048 + thread * 16 + step % 4 * 4 + nibble / 2, 4 * (nibble % 2)};
  }
  // Two words a step, one for each row: columns c, c + 8, c + 1, c + 9.
  return {step / 2 * 2048 + thread * 16 + step % 2 * 8 + lower * 4 + 2 * odd + right, 0};
}

/// Blocks of a matrix, and which kind it is.
struct IntShape {
  IntFormat format = IntFormat::kInt4Group128;
  int strips = 0;    ///< of 64 rows
  int k_blocks = 0;  ///< of 128 columns

  std::size_t blocks() const { return static_cast<std::size_t>(strips) * static_cast<std::size_t>(k_blocks); }
};

/// The blocks of a matrix on the device.
struct IntBlocks {
  const std::uint8_t* codes = nullptr;
  const float* scales = nullptr;        ///< kInt8Row: [n], else [strips][k_blocks · groups][64]
  const std::uint8_t* zeros = nullptr;  ///< unused for kInt8Row, else likewise
  int strips = 0;                       ///< of 64 rows
  int k_blocks = 0;                     ///< of 128 columns

  IntBlocks() = default;
  IntBlocks(const Weights& w, const IntShape& shape)
      : codes(static_cast<const std::uint8_t*>(w.data)),
        scales(w.scales),
        zeros(w.zeros),
        strips(shape.strips),
        k_blocks(shape.k_blocks) {}
};

/// False where `w` is neither kInt8 nor kInt4, or of sizes or groups that there are no kernels for.
inline bool int_shape(const Weights& w, IntShape& shape) {
  if (w.n <= 0 || w.k <= 0 || w.n % 16 != 0 || w.k % 16 != 0 || w.scales == nullptr) return false;
  if (w.type == WeightType::kInt4) {
    if (w.group != 128 && w.group != 32) return false;
    shape.format = w.group == 128 ? IntFormat::kInt4Group128 : IntFormat::kInt4Group32;
  } else if (w.type == WeightType::kInt8) {
    if (w.group != 0 && w.group != 32) return false;
    shape.format = w.group == 0 ? IntFormat::kInt8Row : IntFormat::kInt8Group32;
  } else {
    return false;
  }
  if (w.group != 0 && w.zeros == nullptr) return false;
  shape.strips = (w.n + kIntRows - 1) / kIntRows;
  shape.k_blocks = (w.k + kIntColumns - 1) / kIntColumns;
  return true;
}

}  // namespace aotllm::cuda
