#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "aotllm/adapter.h"
#include "tiny_model.h"

namespace aotllm::testing_support {

using Vector = std::vector<double>;

/// The oracle: a decoder over a whole prompt in double precision, written as its definition, with neither cache, blocks
/// nor batches.
class NaiveModel {
 public:
  explicit NaiveModel(const TinyModel& model, const Adapter& adapter = {})
      : m_(model), s_(model.spec), adapter_(adapter) {}

  /// Logits [tokens, vocab].
  std::vector<Vector> forward(std::span<const std::int32_t> tokens) const {
    std::vector<Vector> x;
    const Matrix& embedding = m_.matrices.at("embedding");
    for (const int token : tokens) {
      Vector row(s_.hidden);
      for (int i = 0; i < s_.hidden; ++i) row[i] = embedding.values[token * s_.hidden + i] * double{s_.embedding_scale};
      x.push_back(row);
    }
    for (int layer = 0; layer < s_.layers; ++layer) run_layer(layer, x);
    std::vector<Vector> logits;
    for (const Vector& row : x) {
      logits.push_back(linear("embedding", "lm_head.bias", 0, norm(row, "final_norm")));
      if (s_.final_softcap > 0) {
        for (double& v : logits.back()) v = s_.final_softcap * std::tanh(v / s_.final_softcap);
      }
    }
    return logits;
  }

 private:
  Vector norm(Vector x, const std::string& name) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= scale * m_.vectors.at(name)[i];
    return x;
  }

  static double largest_of(const Vector& x, std::size_t begin, std::size_t end) {
    double largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(x[i]));
    return largest;
  }

  static void round_to_multiples(Vector& x, std::size_t begin, std::size_t end, double step) {
    for (std::size_t i = begin; i < end && step > 0; ++i) x[i] = std::nearbyint(x[i] / step) * step;
  }

  /// 8 bits per value, a scale for each `size` values: the int8 cache of a head (docs/engine_format.md).
  static Vector quantized(Vector x, std::size_t size) {
    for (std::size_t i = 0; i < x.size(); i += size)
      round_to_multiples(x, i, i + size, largest_of(x, i, i + size) / 127);
    return x;
  }

  /// What block formats make of their input: 8 bits per value, a scale for all and a whole factor for each 16 values.
  static Vector quantized_for_blocks(Vector x) {
    const double finest = largest_of(x, 0, x.size()) / 0x1p14;
    for (std::size_t i = 0; i < x.size() && finest > 0; i += 16) {
      round_to_multiples(x, i, i + 16, finest / 127 * std::nearbyint(largest_of(x, i, i + 16) / finest + 0.49));
    }
    return x;
  }

  /// To 8 significant bits, half to even: what bf16 weights make of their input, and the bf16 cache.
  static Vector rounded_to_bf16(Vector x) {
    for (double& v : x) {
      int exponent = 0;
      const double mantissa = std::frexp(v, &exponent);
      v = std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
    }
    return x;
  }

  Vector as_read_by(const std::string& format, const Vector& x) const {
    return format == "q8_0" ? quantized_for_blocks(x) : format == "bf16" ? rounded_to_bf16(x) : x;
  }

  /// W · x + bias[bias_begin …) where the model has that bias.
  Vector linear(const std::string& name, const std::string& bias, int bias_begin, const Vector& input) const {
    const Matrix& w = m_.matrices.at(name);
    const Vector x = as_read_by(m_.format_of(name), input);
    Vector y(w.n, 0.0);
    for (int row = 0; row < w.n; ++row) {
      for (int c = 0; c < w.k; ++c) y[row] += double{w.values[row * w.k + c]} * x[c];
      if (m_.vectors.contains(bias)) y[row] += m_.vectors.at(bias)[bias_begin + row];
    }
    for (const LowRankUpdate& update : adapter_.updates) {
      if (name == "layers." + std::to_string(update.layer) + "." + adapter_module_name(update.module)) {
        add_update(update, input, y);
      }
    }
    return y;
  }

  /// y += B · (A · x)
  static void add_update(const LowRankUpdate& update, const Vector& x, Vector& y) {
    for (int r = 0; r < update.rank; ++r) {
      double product = 0;
      for (int c = 0; c < update.in; ++c) product += double{update.a[r * update.in + c]} * x[c];
      for (int row = 0; row < update.out; ++row) y[row] += double{update.b[row * update.rank + r]} * product;
    }
  }

  void rotate(double* head, int position) const {
    for (int i = 0; i < s_.rotary_half; ++i) {
      const double angle = position * double{m_.inv_freq[i]};
      const double a = head[i];
      const double b = head[i + s_.rotary_half];
      head[i] = a * std::cos(angle) - b * std::sin(angle);
      head[i + s_.rotary_half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  void norm_and_rotate(Vector& heads, const std::string& norm_name, int position) const {
    for (std::size_t at = 0; at < heads.size(); at += s_.head_dim) {
      if (s_.qk_norm) {
        const Vector normed = norm(Vector(heads.begin() + at, heads.begin() + at + s_.head_dim), norm_name);
        std::copy(normed.begin(), normed.end(), heads.begin() + at);
      }
      rotate(heads.data() + at, position);
    }
  }

  Vector attend(const Vector& q, const std::vector<Vector>& k, const std::vector<Vector>& v, int position,
                int window) const {
    Vector out(q.size(), 0.0);
    const int first = window == 0 ? 0 : std::max(0, position - window + 1);
    for (int head = 0; head < s_.heads; ++head) {
      const int kv_at = head / (s_.heads / s_.kv_heads) * s_.head_dim;
      Vector weights;
      for (int t = first; t <= position; ++t) {
        double score = 0;
        for (int i = 0; i < s_.head_dim; ++i) score += q[head * s_.head_dim + i] * k[t][kv_at + i];
        score *= 0.3f;
        if (s_.attention_softcap > 0) score = s_.attention_softcap * std::tanh(score / s_.attention_softcap);
        weights.push_back(std::exp(score));
      }
      double sum = 0;
      for (const double w : weights) sum += w;
      for (int t = first; t <= position; ++t) {
        for (int i = 0; i < s_.head_dim; ++i) out[head * s_.head_dim + i] += weights[t - first] / sum * v[t][kv_at + i];
      }
    }
    return out;
  }

  double activate(double x) const {
    if (std::string(s_.activation) == "silu") return x / (1 + std::exp(-x));
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }

  void add_residual(Vector& x, Vector y, const std::string& post_norm) const {
    if (s_.post_norm) y = norm(std::move(y), post_norm);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  void run_layer(int layer, std::vector<Vector>& x) const {
    const std::string l = "layers." + std::to_string(layer) + ".";
    const int q_width = s_.heads * s_.head_dim;
    const int kv_width = s_.kv_heads * s_.head_dim;
    std::vector<Vector> q;
    std::vector<Vector> k;
    std::vector<Vector> v;
    for (int t = 0; t < static_cast<int>(x.size()); ++t) {
      const Vector h = norm(x[t], l + "attn_norm");
      q.push_back(linear(l + "q", l + "qkv.bias", 0, h));
      k.push_back(linear(l + "k", l + "qkv.bias", q_width, h));
      v.push_back(linear(l + "v", l + "qkv.bias", q_width + kv_width, h));
      norm_and_rotate(q.back(), l + "q_norm", t);
      norm_and_rotate(k.back(), l + "k_norm", t);
      if (std::string(s_.kv_dtype) == "int8") {
        k.back() = quantized(std::move(k.back()), s_.head_dim);
        v.back() = quantized(std::move(v.back()), s_.head_dim);
      } else if (std::string(s_.kv_dtype) == "bf16") {
        k.back() = rounded_to_bf16(std::move(k.back()));
        v.back() = rounded_to_bf16(std::move(v.back()));
      }
    }
    for (int t = 0; t < static_cast<int>(x.size()); ++t) {
      const Vector attention = attend(q[t], k, v, t, layer % 2 == 1 ? s_.window : 0);
      add_residual(x[t], linear(l + "o", l + "o.bias", 0, attention), l + "post_attn");
      const Vector h = norm(x[t], l + "mlp_norm");
      add_residual(x[t], s_.has_experts(layer) ? mixture(layer, h) : mlp(l, h), l + "post_mlp");
    }
  }

  /// The gated MLP whose matrices begin with `prefix`.
  Vector mlp(const std::string& prefix, const Vector& h) const {
    Vector gate = linear(prefix + "gate", prefix + "gate.bias", 0, h);
    const Vector up = linear(prefix + "up", prefix + "up.bias", 0, h);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = activate(gate[i]) * up[i];
    return linear(prefix + "down", "none", 0, gate);
  }

  /// Every expert that has fewer than `top_k` better ones, weighted by the softmax over all of them.
  Vector mixture(int layer, const Vector& h) const {
    const std::vector<float>& router = m_.vectors.at("layers." + std::to_string(layer) + ".router");
    Vector odds;
    for (int e = 0; e < s_.experts; ++e) {
      double logit = 0;
      for (int i = 0; i < s_.hidden; ++i) logit += double{router[e * s_.hidden + i]} * h[i];
      odds.push_back(std::exp(logit));
    }
    double total = 0;
    double chosen = 0;
    Vector y(s_.hidden, 0.0);
    for (int e = 0; e < s_.experts; ++e) {
      total += odds[e];
      if (std::count_if(odds.begin(), odds.end(), [&](double other) { return other > odds[e]; }) >= s_.top_k) continue;
      chosen += odds[e];
      const Vector part = mlp(m_.mlps(layer)[e], h);
      for (int i = 0; i < s_.hidden; ++i) y[i] += odds[e] * part[i];
    }
    for (double& v : y) v /= s_.normalize ? chosen : total;
    return y;
  }

  const TinyModel& m_;
  const TinySpec& s_;
  const Adapter adapter_;
};

}  // namespace aotllm::testing_support
