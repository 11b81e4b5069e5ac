#pragma once

#include <immintrin.h>

#include <cstdint>

namespace aotllm::cpu::AOTLLM_ISA {

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};
/// A 64-byte line: byte 4·r + j belongs to lane r.
struct U8x64 {
  __m256i lo, hi;
};
/// All bits of a lane set or clear.
struct Mask16 {
  __m256 lo, hi;
};
/// Pairs of int16: lane r has elements 2·r and 2·r + 1.
struct I16x32 {
  __m256i lo, hi;
};

/// Rows of a matmul tile: as many as keep the integer sums in 16 registers.
inline constexpr int kMaxTileRows = 4;
/// Query vectors of an attention batch, and lines of K or V that they meet at a time: sums take half of the registers.
inline constexpr int kMaxBatchVectors = 4;
inline constexpr int kBatchLines = 1;

// ---- float lanes

inline F32x16 set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline F32x16 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline F32x16 load_8(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_setzero_ps()};
}
inline void store_8(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
}

inline __m256i first_lanes_8(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F32x16 load_partial(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes_8(n)), _mm256_maskload_ps(p + 8, first_lanes_8(n - 8))};
}
inline void store_partial(float* p, F32x16 x, int n) {
  _mm256_maskstore_ps(p, first_lanes_8(n), x.lo);
  _mm256_maskstore_ps(p + 8, first_lanes_8(n - 8), x.hi);
}

inline F32x16 load_f16(const std::uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}

inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
/// a · b + c, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
/// The second operand where either is NaN: `max(limit, x)` keeps a NaN in x, `max(x, limit)` drops it.
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
/// As `max`.
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F32x16 round_even(F32x16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}

// ---- integer lanes

inline I32x16 set1_i32(std::int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
inline I32x16 add(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline I32x16 sub(I32x16 a, I32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline I32x16 max(I32x16 a, I32x16 b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
inline I32x16 bit_and(I32x16 a, I32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline I32x16 bit_or(I32x16 a, I32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int N>
I32x16 shift_left(I32x16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
I32x16 shift_right(I32x16 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
inline I32x16 load_i32(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
/// 16 words, zero-extended.
inline I32x16 load_u16(const std::uint8_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
/// 16 bytes, zero- or sign-extended.
inline I32x16 load_u8(const std::uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I32x16 load_i8(const std::uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
/// Stores the low byte of each lane; lanes are in [-128, 127].
inline void store_i8(std::int8_t* p, I32x16 x) {
  // packs interleave 128-bit halves: lanes 0-3, 8-11, 4-7, 12-15.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline F32x16 to_f32(I32x16 a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
/// Round to nearest even.
inline I32x16 to_i32(F32x16 a) {
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
inline I32x16 bits(F32x16 a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
inline F32x16 from_bits(I32x16 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}

// ---- masks

/// Lanes [begin, end).
inline Mask16 lanes_between(int begin, int end) {
  return {_mm256_castsi256_ps(_mm256_andnot_si256(first_lanes_8(begin), first_lanes_8(end))),
          _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes_8(begin - 8), first_lanes_8(end - 8)))};
}
inline F32x16 select(Mask16 m, F32x16 if_set, F32x16 if_clear) {
  return {_mm256_blendv_ps(if_clear.lo, if_set.lo, m.lo), _mm256_blendv_ps(if_clear.hi, if_set.hi, m.hi)};
}

// ---- reductions over lanes; the tree is 8, 4, 2, 1 on every ISA

inline float reduce_add(F32x16 a) {
  const __m256 x8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}
inline float reduce_max(F32x16 a) {
  const __m256 x8 = _mm256_max_ps(a.lo, a.hi);
  const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_max_ss(x2, _mm_movehdup_ps(x2)));
}
inline std::int32_t reduce_add(I32x16 a) {
  const __m256i x8 = _mm256_add_epi32(a.lo, a.hi);
  const __m128i x4 = _mm_add_epi32(_mm256_castsi256_si128(x8), _mm256_extracti128_si256(x8, 1));
  const __m128i x2 = _mm_add_epi32(x4, _mm_unpackhi_epi64(x4, x4));
  return _mm_cvtsi128_si32(_mm_add_epi32(x2, _mm_shuffle_epi32(x2, 1)));
}
inline std::int32_t reduce_max(I32x16 a) {
  const __m256i x8 = _mm256_max_epi32(a.lo, a.hi);
  const __m128i x4 = _mm_max_epi32(_mm256_castsi256_si128(x8), _mm256_extracti128_si256(x8, 1));
  const __m128i x2 = _mm_max_epi32(x4, _mm_unpackhi_epi64(x4, x4));
  return _mm_cvtsi128_si32(_mm_max_epi32(x2, _mm_shuffle_epi32(x2, 1)));
}

/// The tree over lanes of four vectors at a time.
template <class Combine>
void reduce_4(const F32x16* x, float* out, Combine combine) {
  const auto fours = [=](F32x16 a, F32x16 b) {  // lanes [0, 4) of a, then of b
    const __m256 a8 = combine(a.lo, a.hi);
    const __m256 b8 = combine(b.lo, b.hi);
    return combine(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31));
  };
  const __m256 ab = fours(x[0], x[1]);
  const __m256 cd = fours(x[2], x[3]);
  const __m256 twos = combine(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));  // a, a, c, c | b …
  const __m256 ones = combine(twos, _mm256_permute_ps(twos, 0xB1));                               // a, a, c, c | b …
  const __m128 a_c = _mm256_castps256_ps128(ones);
  const __m128 b_d = _mm256_extractf128_ps(ones, 1);
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_shuffle_ps(a_c, a_c, 0x88), _mm_shuffle_ps(b_d, b_d, 0x88)));
}
/// out[i] = reduce_add(x[i]) for i in [0, 4).
inline void reduce_add_4(const F32x16* x, float* out) {
  reduce_4(x, out, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
/// out[i] = reduce_max(x[i]) for i in [0, 4).
inline void reduce_max_4(const F32x16* x, float* out) {
  reduce_4(x, out, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}

// ---- code bytes

inline U8x64 load_line(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline U8x64 bit_and(U8x64 a, int byte) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(byte));
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
/// a + byte; sums stay below 256.
inline U8x64 add_bytes(U8x64 a, int byte) {
  const __m256i b = _mm256_set1_epi8(static_cast<char>(byte));
  return {_mm256_add_epi8(a.lo, b), _mm256_add_epi8(a.hi, b)};
}
/// (a & Mask) | b, of bits b that are not in the mask.
template <int Mask>
U8x64 merge_bits(U8x64 a, U8x64 b) {
  const U8x64 low = bit_and(a, Mask);
  return {_mm256_or_si256(low.lo, b.lo), _mm256_or_si256(low.hi, b.hi)};
}
/// Shifts 16-bit words left by N (right by -N): bits cross byte borders and must be masked off.
template <int N>
U8x64 shift_words(U8x64 a) {
  if constexpr (N >= 0) {
    return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)};
  } else {
    return {_mm256_srli_epi16(a.lo, -N), _mm256_srli_epi16(a.hi, -N)};
  }
}
/// table[byte] for bytes below 16.
inline U8x64 look_up(const std::int8_t* table, U8x64 index) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, index.lo), _mm256_shuffle_epi8(t, index.hi)};
}

// ---- dot products of code bytes with four activations per lane

/// Four activation bytes, in each lane.
struct Quad {
  __m256i v;
};
inline Quad broadcast_quad(const std::int8_t* p) {
  std::int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}

/// Sums of products in int16 pairs per lane; the caller bounds how many groups fit.
struct DotSum {
  __m256i lo, hi;
};
/// Adds unsigned codes · activations.
inline DotSum dot(DotSum s, U8x64 codes, Quad a) {
  return {_mm256_add_epi16(s.lo, _mm256_maddubs_epi16(codes.lo, a.v)),
          _mm256_add_epi16(s.hi, _mm256_maddubs_epi16(codes.hi, a.v))};
}
inline I32x16 lane_sums(DotSum s) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(s.lo, ones), _mm256_madd_epi16(s.hi, ones)};
}

/// Signed codes in the form that the dot product wants; what it adds to each code is `kSignedBias`.
struct SignedCodes {
  U8x64 magnitude, sign;
};
inline constexpr int kSignedBias = 0;
inline SignedCodes signed_codes(U8x64 w) {
  return {{_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}, w};
}
inline DotSum dot(DotSum s, SignedCodes w, Quad a) {
  return {_mm256_add_epi16(s.lo, _mm256_maddubs_epi16(w.magnitude.lo, _mm256_sign_epi8(a.v, w.sign.lo))),
          _mm256_add_epi16(s.hi, _mm256_maddubs_epi16(w.magnitude.hi, _mm256_sign_epi8(a.v, w.sign.hi)))};
}

// ---- dot products of pairs of int16

/// 32 code bytes, sign-extended.
inline I16x32 load_pairs(const std::uint8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
/// 32 codes of 16 bits.
inline I16x32 load_wide_pairs(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
/// One pair, in each lane.
inline I16x32 broadcast_pair(const std::int16_t* p) {
  std::int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
/// Pairs of `first` and `second`, lanes in the range of int16.
inline I16x32 pair_up(I32x16 first, I32x16 second) {
  constexpr int kOdd = 0xAA;
  return {_mm256_blend_epi16(first.lo, _mm256_slli_epi32(second.lo, 16), kOdd),
          _mm256_blend_epi16(first.hi, _mm256_slli_epi32(second.hi, 16), kOdd)};
}
/// The products of each lane's pairs; the caller bounds their sum to 32 bits.
inline I32x16 dot(I16x32 a, I16x32 b) {
  return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)};
}
/// sum + the products of each lane's pairs; the caller bounds them to 32 bits.
inline I32x16 add_dot(I32x16 sum, I16x32 a, I16x32 b) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
/// Stores lanes, which are in the range of int16.
inline void store_i16(std::int16_t* p, I32x16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

// ---- bfloat16

/// Stores the low half of each lane.
inline void store_u16(std::uint16_t* p, I32x16 x) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xD8));
}

}  // namespace aotllm::cpu::AOTLLM_ISA
