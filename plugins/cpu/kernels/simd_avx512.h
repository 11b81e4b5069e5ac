#pragma once

#include <immintrin.h>

#include <cstdint>

namespace aotllm::cpu::AOTLLM_ISA {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
/// A 64-byte line: byte 4·r + j belongs to lane r.
struct U8x64 {
  __m512i v;
};
struct Mask16 {
  __mmask16 m;
};
/// Pairs of int16: lane r has elements 2·r and 2·r + 1.
struct I16x32 {
  __m512i v;
};

/// Rows of a matmul tile: integer and float sums of 8 rows take half of the 32 registers.
inline constexpr int kMaxTileRows = 8;
/// Query vectors of an attention batch, and lines of K or V that they meet at a time: sums take half of the registers.
inline constexpr int kMaxBatchVectors = 8;
inline constexpr int kBatchLines = 2;

// ---- float lanes

inline F32x16 set1(float x) {
  return {_mm512_set1_ps(x)};
}
inline F32x16 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void store(float* p, F32x16 x) {
  _mm512_storeu_ps(p, x.v);
}
inline F32x16 load_8(const float* p) {
  return {_mm512_maskz_loadu_ps(0xFF, p)};
}
inline void store_8(float* p, F32x16 x) {
  _mm512_mask_storeu_ps(p, 0xFF, x.v);
}

/// Lanes [0, n) for n in [0, 16].
inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}
inline F32x16 load_partial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
inline void store_partial(float* p, F32x16 x, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x.v);
}

inline F32x16 load_f16(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
/// a · b + c, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
/// The second operand where either is NaN: `max(limit, x)` keeps a NaN in x, `max(x, limit)` drops it.
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
/// As `max`.
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline F32x16 round_even(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// ---- integer lanes

inline I32x16 set1_i32(std::int32_t x) {
  return {_mm512_set1_epi32(x)};
}
inline I32x16 add(I32x16 a, I32x16 b) {
  return {_mm512_add_epi32(a.v, b.v)};
}
inline I32x16 sub(I32x16 a, I32x16 b) {
  return {_mm512_sub_epi32(a.v, b.v)};
}
inline I32x16 max(I32x16 a, I32x16 b) {
  return {_mm512_max_epi32(a.v, b.v)};
}
inline I32x16 bit_and(I32x16 a, I32x16 b) {
  return {_mm512_and_si512(a.v, b.v)};
}
inline I32x16 bit_or(I32x16 a, I32x16 b) {
  return {_mm512_or_si512(a.v, b.v)};
}
template <int N>
I32x16 shift_left(I32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
I32x16 shift_right(I32x16 a) {
  return {_mm512_srai_epi32(a.v, N)};
}
inline I32x16 load_i32(const std::uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
/// 16 words, zero-extended.
inline I32x16 load_u16(const std::uint8_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
/// 16 bytes, zero- or sign-extended.
inline I32x16 load_u8(const std::uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I32x16 load_i8(const std::uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
/// Stores the low byte of each lane; lanes are in [-128, 127].
inline void store_i8(std::int8_t* p, I32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

inline F32x16 to_f32(I32x16 a) {
  return {_mm512_cvtepi32_ps(a.v)};
}
/// Round to nearest even.
inline I32x16 to_i32(F32x16 a) {
  return {_mm512_cvtps_epi32(a.v)};
}
inline I32x16 bits(F32x16 a) {
  return {_mm512_castps_si512(a.v)};
}
inline F32x16 from_bits(I32x16 a) {
  return {_mm512_castsi512_ps(a.v)};
}

// ---- masks

/// Lanes [begin, end).
inline Mask16 lanes_between(int begin, int end) {
  return {static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin))};
}
inline F32x16 select(Mask16 m, F32x16 if_set, F32x16 if_clear) {
  return {_mm512_mask_blend_ps(m.m, if_clear.v, if_set.v)};
}

// ---- reductions over lanes; the tree is 8, 4, 2, 1 on every ISA

inline __m256 upper_half(__m512 v) {
  return _mm512_extractf32x8_ps(v, 1);
}
inline __m256i upper_half(__m512i v) {
  return _mm512_extracti32x8_epi32(v, 1);
}

inline float reduce_add(F32x16 a) {
  const __m256 x8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}
inline float reduce_max(F32x16 a) {
  const __m256 x8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_max_ss(x2, _mm_movehdup_ps(x2)));
}
inline std::int32_t reduce_add(I32x16 a) {
  const __m256i x8 = _mm256_add_epi32(_mm512_castsi512_si256(a.v), upper_half(a.v));
  const __m128i x4 = _mm_add_epi32(_mm256_castsi256_si128(x8), _mm256_extracti128_si256(x8, 1));
  const __m128i x2 = _mm_add_epi32(x4, _mm_unpackhi_epi64(x4, x4));
  return _mm_cvtsi128_si32(_mm_add_epi32(x2, _mm_shuffle_epi32(x2, 1)));
}
inline std::int32_t reduce_max(I32x16 a) {
  const __m256i x8 = _mm256_max_epi32(_mm512_castsi512_si256(a.v), upper_half(a.v));
  const __m128i x4 = _mm_max_epi32(_mm256_castsi256_si128(x8), _mm256_extracti128_si256(x8, 1));
  const __m128i x2 = _mm_max_epi32(x4, _mm_unpackhi_epi64(x4, x4));
  return _mm_cvtsi128_si32(_mm_max_epi32(x2, _mm_shuffle_epi32(x2, 1)));
}

/// The tree over lanes of four vectors at a time: lane 4 · i is that of vector i.
template <class Combine>
__m512 reduce_4(const F32x16* x, Combine combine) {
  const auto halves = [=](F32x16 a, F32x16 b) {  // lanes [0, 8) of a, then of b
    return combine(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
  };
  const __m512 ab = halves(x[0], x[1]);
  const __m512 cd = halves(x[2], x[3]);
  const __m512 fours = combine(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  const __m512 twos = combine(fours, _mm512_permute_ps(fours, 0x4E));
  return combine(twos, _mm512_permute_ps(twos, 0xB1));
}
inline void store_fourth_lanes(float* out, __m512 x) {
  const __m512i every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, x)));
}
/// out[i] = reduce_add(x[i]) for i in [0, 4).
inline void reduce_add_4(const F32x16* x, float* out) {
  store_fourth_lanes(out, reduce_4(x, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); }));
}
/// out[i] = reduce_max(x[i]) for i in [0, 4).
inline void reduce_max_4(const F32x16* x, float* out) {
  store_fourth_lanes(out, reduce_4(x, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }));
}

// ---- code bytes

inline U8x64 load_line(const std::uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
inline U8x64 bit_and(U8x64 a, int byte) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(byte)))};
}
/// a + byte; sums stay below 256.
inline U8x64 add_bytes(U8x64 a, int byte) {
  return {_mm512_add_epi8(a.v, _mm512_set1_epi8(static_cast<char>(byte)))};
}
/// (a & Mask) | b, of bits b that are not in the mask.
template <int Mask>
U8x64 merge_bits(U8x64 a, U8x64 b) {
  constexpr int kSelect = 0xCA;  // first ? second : third
  return {_mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(Mask)), a.v, b.v, kSelect)};
}
/// Shifts 16-bit words left by N (right by -N): bits cross byte borders and must be masked off.
template <int N>
U8x64 shift_words(U8x64 a) {
  if constexpr (N >= 0) {
    return {_mm512_slli_epi16(a.v, N)};
  } else {
    return {_mm512_srli_epi16(a.v, -N)};
  }
}
/// table[byte] for bytes below 16.
inline U8x64 look_up(const std::int8_t* table, U8x64 index) {
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(t, index.v)};
}

// ---- dot products of code bytes with four activations per lane

/// Four activation bytes, in each lane.
struct Quad {
  __m512i v;
};
inline Quad broadcast_quad(const std::int8_t* p) {
  std::int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}

#if defined(__AVX512VNNI__)

/// Sums of products in int32 lanes.
using DotSum = I32x16;
/// Adds unsigned codes · activations.
inline DotSum dot(DotSum s, U8x64 codes, Quad a) {
  return {_mm512_dpbusd_epi32(s.v, codes.v, a.v)};
}

/// Signed codes in the form that the dot product wants; what it adds to each code is `kSignedBias`.
struct SignedCodes {
  U8x64 biased;
};
inline constexpr int kSignedBias = 128;
inline SignedCodes signed_codes(U8x64 w) {
  return {{_mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)))}};
}
inline DotSum dot(DotSum s, SignedCodes w, Quad a) {
  return dot(s, w.biased, a);
}

#else

/// Sums of products in int16 pairs per lane; the caller bounds how many groups fit.
struct DotSum {
  __m512i v;
};
/// Adds unsigned codes · activations.
inline DotSum dot(DotSum s, U8x64 codes, Quad a) {
  return {_mm512_add_epi16(s.v, _mm512_maddubs_epi16(codes.v, a.v))};
}
inline I32x16 lane_sums(DotSum s) {
  return {_mm512_madd_epi16(s.v, _mm512_set1_epi16(1))};
}

/// Signed codes in the form that the dot product wants; what it adds to each code is `kSignedBias`.
struct SignedCodes {
  U8x64 magnitude;
  __mmask64 negative;
};
inline constexpr int kSignedBias = 0;
inline SignedCodes signed_codes(U8x64 w) {
  return {{_mm512_abs_epi8(w.v)}, _mm512_movepi8_mask(w.v)};
}
inline DotSum dot(DotSum s, SignedCodes w, Quad a) {
  return dot(s, w.magnitude, {_mm512_mask_sub_epi8(a.v, w.negative, _mm512_setzero_si512(), a.v)});
}

#endif

// ---- dot products of pairs of int16

/// 32 code bytes, sign-extended.
inline I16x32 load_pairs(const std::uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
/// 32 codes of 16 bits.
inline I16x32 load_wide_pairs(const std::uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
/// One pair, in each lane.
inline I16x32 broadcast_pair(const std::int16_t* p) {
  std::int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
/// Pairs of `first` and `second`, lanes in the range of int16.
inline I16x32 pair_up(I32x16 first, I32x16 second) {
  return {_mm512_mask_blend_epi16(0x55555555, _mm512_slli_epi32(second.v, 16), first.v)};
}
/// The products of each lane's pairs; the caller bounds their sum to 32 bits.
inline I32x16 dot(I16x32 a, I16x32 b) {
  return {_mm512_madd_epi16(a.v, b.v)};
}
/// sum + the products of each lane's pairs; the caller bounds them to 32 bits.
inline I32x16 add_dot(I32x16 sum, I16x32 a, I16x32 b) {
#if defined(__AVX512VNNI__)
  // Not _mm512_dpwssd_epi32: GCC 12 copies every sum of a loop to another register and back around it.
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
/// Stores lanes, which are in the range of int16.
inline void store_i16(std::int16_t* p, I32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}

// ---- bfloat16

/// Stores the low half of each lane.
inline void store_u16(std::uint16_t* p, I32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}

#if defined(__AVX512BF16__)
/// sum + the products of each lane's pairs of bfloat16: the upper pair first, each sum rounded; subnormals are zeros.
inline F32x16 add_dot_bf16(F32x16 sum, I32x16 a, I32x16 b) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
#endif

}  // namespace aotllm::cpu::AOTLLM_ISA
