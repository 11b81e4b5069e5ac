#include "kernels/math.h"
#include "kernels/ops.h"

namespace aotllm::cpu::AOTLLM_ISA {

namespace {

// x / (1 + e^-x). The clamp only touches values whose result is ±0 anyway and keeps -inf / inf away.
inline F32x16 silu(F32x16 x) {
  const F32x16 c = max(set1(-110.0f), x);
  return div(c, add(set1(1.0f), exp(sub(set1(0.0f), c))));
}

// x/2 · (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2/π) · (x + 0.044715 x³): no cancellation for x < 0. The clamp
// only touches values whose result is ±0 anyway.
inline F32x16 gelu_tanh(F32x16 x) {
  constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
  const F32x16 c = max(set1(-15.0f), x);
  const F32x16 cubic = fma(mul(mul(c, c), c), set1(0.044715f), c);
  return div(c, add(set1(1.0f), exp(mul(cubic, set1(-kTwoSqrt2OverPi)))));
}

template <class Op>
inline void for_lanes(int n, Op op) {
  for (int i = 0; i < n; i += kLanes) op(i, n - i);
}

/// N dot products side by side: N independent chains hide the latency of fma.
template <int N>
inline void dots(const float* a, const float* x, int k, float* out) {
  F32x16 sums[N];
  for (int i = 0; i < N; ++i) sums[i] = set1(0.0f);
  for_lanes(k, [&](int c, int left) {
    const F32x16 v = load_lanes(x + c, left);
    for (int i = 0; i < N; ++i) sums[i] = fma(load_lanes(a + static_cast<std::ptrdiff_t>(i) * k + c, left), v, sums[i]);
  });
  for (int i = 0; i < N; ++i) out[i] = reduce_add(sums[i]);
}

}  // namespace

void rms_norm(const float* x, const float* w, float eps, int n, float* y) {
  const F32x16 factor = set1(rms_factor(x, eps, n));
  for_lanes(n, [&](int i, int left) {
    store_lanes(y + i, mul(mul(load_lanes(x + i, left), factor), load_lanes(w + i, left)), left);
  });
}

// x[i], x[i + half] are the real and imaginary part of one rotation.
void rope(float* x, const float* cos, const float* sin, int half) {
  for_lanes(half, [&](int i, int left) {
    const F32x16 re = load_lanes(x + i, left);
    const F32x16 im = load_lanes(x + half + i, left);
    const F32x16 c = load_lanes(cos + i, left);
    const F32x16 s = load_lanes(sin + i, left);
    store_lanes(x + i, sub(mul(re, c), mul(im, s)), left);
    store_lanes(x + half + i, add(mul(im, c), mul(re, s)), left);
  });
}

void act_mul(Activation act, const float* gate, const float* up, int n, float* out) {
  if (act == Activation::kSilu) {
    for_lanes(n, [&](int i, int left) {
      store_lanes(out + i, mul(silu(load_lanes(gate + i, left)), load_lanes(up + i, left)), left);
    });
  } else {
    for_lanes(n, [&](int i, int left) {
      store_lanes(out + i, mul(gelu_tanh(load_lanes(gate + i, left)), load_lanes(up + i, left)), left);
    });
  }
}

void add(const float* a, const float* b, int n, float* out) {
  for_lanes(
      n, [&](int i, int left) { store_lanes(out + i, add(load_lanes(a + i, left), load_lanes(b + i, left)), left); });
}

void add_scaled(const float* a, float scale, const float* b, int n, float* out) {
  const F32x16 s = set1(scale);
  for_lanes(n, [&](int i, int left) {
    store_lanes(out + i, fma(load_lanes(b + i, left), s, load_lanes(a + i, left)), left);
  });
}

void softcap(float* x, int n, float cap) {
  const F32x16 c = set1(cap);
  for_lanes(n, [&](int i, int left) { store_lanes(x + i, mul(c, tanh(div(load_lanes(x + i, left), c))), left); });
}

// Per product sixteen lane-wise sums in ascending c, then the tree of `reduce_add`, however many are side by side.
void dot_rows(const float* a, const float* x, int n, int k, float* out) {
  int i = 0;
  for (; i + 4 <= n; i += 4) dots<4>(a + static_cast<std::ptrdiff_t>(i) * k, x, k, out + i);
  for (; i < n; ++i) dots<1>(a + static_cast<std::ptrdiff_t>(i) * k, x, k, out + i);
}

}  // namespace aotllm::cpu::AOTLLM_ISA
