#pragma once

// Sixteen lanes, whatever the register width: two ymm on AVX2, one zmm on AVX-512. Kernels are written once over
// these types. All of it lives in the namespace of the ISA, so that the linker never merges code of two ISAs; for the
// same reason kernels use no templates or inline functions of the standard library.
//
// Every function does the same IEEE operations on every ISA, so float results agree bit for bit between ISAs.

#ifndef AOTLLM_ISA
#error "kernels are compiled once per ISA with -DAOTLLM_ISA=<name>"
#endif

#if defined(__AVX512F__)
#include "kernels/simd_avx512.h"
#else
#include "kernels/simd_avx2.h"
#endif

namespace aotllm::cpu::AOTLLM_ISA {

inline constexpr int kLanes = 16;

/// Lanes [0, n) of memory, the others 0; n in [0, 16].
inline F32x16 load_lanes(const float* p, int n) {
  return n >= kLanes ? load(p) : load_partial(p, n);
}

/// Asks for a line of memory, into L2: requests of that kind are not bound by the few that L1 can wait for, which makes
/// twice the bandwidth of memory. Any address will do. In assembly, since GCC 12 drops the intrinsic in some functions
/// that are inlined, and all that leads to it.
inline void prefetch(const void* p) {
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
}

/// The sum of 16 bytes.
inline std::int32_t sum_i8(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i biased = _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x80)));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
}

inline void store_lanes(float* p, F32x16 x, int n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_partial(p, x, n);
  }
}

}  // namespace aotllm::cpu::AOTLLM_ISA
