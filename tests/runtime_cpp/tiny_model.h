#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "rank_file_builder.h"

namespace aotllm::testing_support {

/// What a tiny model has; the defaults are those of the Llama family.
struct TinySpec {
  int vocab = 50;
  int hidden = 32;
  int layers = 2;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 8;
  int intermediate = 48;
  int rotary_half = 4;
  int max_seq_len = 128;
  int max_num_tokens = 128;
  bool one_qkv_segment = false;  ///< Q, K and V packed as one segment
  bool bias = false;             ///< on every linear
  bool qk_norm = false;
  bool post_norm = false;
  int window = 0;  ///< of odd layers
  float attention_softcap = 0.0f;
  float final_softcap = 0.0f;
  float embedding_scale = 1.0f;
  const char* activation = "silu";
  const char* v_format = "f32";  ///< f32, bf16 or q8_0, of V and of the down projection
  const char* kv_dtype = "f32";  ///< f32, bf16, int16 or int8
  int experts = 0;               ///< of `intermediate` neurons; 0 = dense layers
  int top_k = 0;
  bool normalize = false;
  int dense_layer = -1;               ///< that has no experts although others have
  const char* expert_format = "f32";  ///< f32, bf16 or q8_0, of the experts' gate and up

  bool has_experts(int layer) const { return experts > 0 && layer != dense_layer; }
};

struct Matrix {
  int n = 0;
  int k = 0;
  std::vector<float> values;  ///< [n, k], exactly what the packed form holds
};

/// f32: for each k the 16 rows of the panel (docs/engine_format.md).
inline std::vector<std::uint8_t> pack_f32(const Matrix& m) {
  std::vector<float> lanes(static_cast<std::size_t>((m.n + 15) / 16) * m.k * 16, 0.0f);
  for (int row = 0; row < m.n; ++row) {
    for (int c = 0; c < m.k; ++c) {
      lanes[(static_cast<std::size_t>(row / 16) * m.k + c) * 16 + row % 16] = m.values[row * m.k + c];
    }
  }
  std::vector<std::uint8_t> bytes(lanes.size() * sizeof(float));
  std::memcpy(bytes.data(), lanes.data(), bytes.size());
  return bytes;
}

/// bf16: for each pair of k the 16 rows, pairs side by side. Values have 8 significant bits at most.
inline std::vector<std::uint8_t> pack_bf16(const Matrix& m) {
  const std::size_t pairs = (static_cast<std::size_t>(m.k) + 1) / 2;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>((m.n + 15) / 16) * pairs * 64, 0);
  for (int row = 0; row < m.n; ++row) {
    for (int c = 0; c < m.k; ++c) {
      std::uint32_t bits;
      std::memcpy(&bits, &m.values[row * m.k + c], sizeof bits);
      const auto upper = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + ((row / 16 * pairs + c / 2) * 16 + row % 16) * 4 + c % 2 * 2, &upper, sizeof upper);
    }
  }
  return bytes;
}

inline constexpr float kQ8Scale = 1.0f / 512;
inline constexpr std::uint16_t kQ8ScaleBits = 0x1800;  ///< kQ8Scale as float16

/// q8_0 with the same scale everywhere: values are multiples of kQ8Scale within ±127. A panel is the 8 code lines of
/// each block, then the 16 scales of each block, padded to 64 bytes.
inline std::vector<std::uint8_t> pack_q8_0(const Matrix& m) {
  const std::size_t blocks = static_cast<std::size_t>(m.k) / 32;
  const std::size_t code_bytes = blocks * 8 * 64;
  const std::size_t panel_bytes = (code_bytes + blocks * 16 * 2 + 63) / 64 * 64;
  std::vector<std::uint8_t> bytes((m.n + 15) / 16 * panel_bytes, 0);
  for (int row = 0; row < m.n; ++row) {
    std::uint8_t* panel = bytes.data() + row / 16 * panel_bytes;
    const int lane = row % 16;
    for (int c = 0; c < m.k; ++c) {
      panel[c / 4 * 64 + lane * 4 + c % 4] =
          static_cast<std::uint8_t>(static_cast<std::int8_t>(std::lround(m.values[row * m.k + c] / kQ8Scale)));
      std::memcpy(panel + code_bytes + (c / 32 * 16 + lane) * 2, &kQ8ScaleBits, 2);
    }
  }
  return bytes;
}

/// A random model of a few kilobytes: its engine file, and its weights for an oracle.
class TinyModel {
 public:
  explicit TinyModel(const TinySpec& spec_in, unsigned seed = 1) : spec(spec_in), random_(seed) {
    const int q = spec.heads * spec.head_dim;
    const int kv = spec.kv_heads * spec.head_dim;
    matrix("embedding", spec.vocab, spec.hidden);
    for (int i = 0; i < spec.rotary_half; ++i) inv_freq.push_back(std::pow(10000.0f, -float(i) / spec.rotary_half));
    for (int layer = 0; layer < spec.layers; ++layer) {
      const std::string l = "layers." + std::to_string(layer) + ".";
      norm(l + "attn_norm", spec.hidden);
      norm(l + "mlp_norm", spec.hidden);
      matrix(l + "q", q, spec.hidden);
      matrix(l + "k", kv, spec.hidden);
      matrix(l + "v", kv, spec.hidden);
      matrix(l + "o", spec.hidden, q);
      if (spec.has_experts(layer)) vector(l + "router", spec.experts * spec.hidden, 0.0f);
      for (const std::string& mlp : mlps(layer)) {
        matrix(mlp + "gate", spec.intermediate, spec.hidden);
        matrix(mlp + "up", spec.intermediate, spec.hidden);
        matrix(mlp + "down", spec.hidden, spec.intermediate);
      }
      if (spec.bias) {
        vector(l + "qkv.bias", q + 2 * kv, 0.0f);
        vector(l + "o.bias", spec.hidden, 0.0f);
        vector(l + "gate.bias", spec.intermediate, 0.0f);
        vector(l + "up.bias", spec.intermediate, 0.0f);
      }
      if (spec.qk_norm) {
        norm(l + "q_norm", spec.head_dim);
        norm(l + "k_norm", spec.head_dim);
      }
      if (spec.post_norm) {
        norm(l + "post_attn", spec.hidden);
        norm(l + "post_mlp", spec.hidden);
      }
    }
    norm("final_norm", spec.hidden);
    if (spec.bias) vector("lm_head.bias", spec.vocab, 0.0f);
  }

  std::vector<std::uint8_t> engine_bytes() const { return engine_bytes(plan()); }
  std::vector<std::uint8_t> engine_bytes(const std::string& plan_text) const {
    RankFileBuilder file;
    file.add_floats("inv_freq", inv_freq);
    for (const auto& [name, values] : vectors) {
      if (name.ends_with(".router")) {
        file.add_rows(name, spec.experts, values);
      } else {
        file.add_floats(name, values);
      }
    }
    for (const auto& [name, m] : matrices) file.add_bytes(name, pack(m, format_of(name)));
    if (spec.one_qkv_segment) {
      for (int layer = 0; layer < spec.layers; ++layer) {
        const std::string l = "layers." + std::to_string(layer) + ".";
        Matrix all{0, spec.hidden, {}};
        for (const char* part : {"q", "k", "v"}) {
          const Matrix& m = matrices.at(l + part);
          all.n += m.n;
          all.values.insert(all.values.end(), m.values.begin(), m.values.end());
        }
        file.add_bytes(l + "qkv", pack_f32(all));
      }
    }
    return file.build(plan_text);
  }

  /// Format of a matrix in the engine: f32, bf16 or q8_0.
  std::string format_of(const std::string& name) const {
    if (name.find(".experts.") != std::string::npos && !name.ends_with(".down")) return spec.expert_format;
    const bool chosen = name.ends_with(".v") || name.ends_with(".down");
    return chosen ? spec.v_format : "f32";
  }

  /// Prefixes of the matrices of a layer's MLP, or of those of its experts.
  std::vector<std::string> mlps(int layer) const {
    const std::string l = "layers." + std::to_string(layer) + ".";
    if (!spec.has_experts(layer)) return {l};
    std::vector<std::string> names;
    for (int e = 0; e < spec.experts; ++e) names.push_back(l + "experts." + std::to_string(e) + ".");
    return names;
  }

  /// The plan's JSON, one op a line.
  std::string plan() const;

  const TinySpec spec;
  std::map<std::string, Matrix> matrices;
  std::map<std::string, std::vector<float>> vectors;
  std::vector<float> inv_freq;

 private:
  static std::vector<std::uint8_t> pack(const Matrix& m, const std::string& format) {
    return format == "q8_0" ? pack_q8_0(m) : format == "bf16" ? pack_bf16(m) : pack_f32(m);
  }

  void matrix(const std::string& name, int n, int k) {
    std::uniform_int_distribution<int> code(-127, 127);  // multiples of kQ8Scale: exact in every format used here
    Matrix m{n, k, std::vector<float>(static_cast<std::size_t>(n) * k)};
    for (float& v : m.values) v = static_cast<float>(code(random_)) * kQ8Scale;
    matrices[name] = std::move(m);
  }

  void vector(const std::string& name, int size, float mean) {
    std::uniform_real_distribution<float> value(mean - 0.25f, mean + 0.25f);
    std::vector<float> v(size);
    for (float& x : v) x = value(random_);
    vectors[name] = std::move(v);
  }
  void norm(const std::string& name, int size) { vector(name, size, 1.0f); }

  std::string linear(const std::string& name, const std::vector<std::string>& parts) const;
  std::string layer_ops(int layer, int& hidden) const;
  std::string feed_forward_ops(int layer, int& hidden) const;

  std::mt19937 random_;
};

inline std::string TinyModel::linear(const std::string& name, const std::vector<std::string>& parts) const {
  int n = 0;
  int k = 0;
  std::string segments;
  for (const std::string& part : parts) {
    const Matrix& m = matrices.at(part);
    n += m.n;
    k = m.k;
    segments += std::string(segments.empty() ? "" : ", ") + "{\"n\": " + std::to_string(m.n) + ", \"format\": \"" +
                format_of(part) + "\", \"tensor\": \"" + part + "\"}";
  }
  if (spec.one_qkv_segment && name.ends_with(".qkv")) {
    segments = "{\"n\": " + std::to_string(n) + ", \"format\": \"f32\", \"tensor\": \"" + name + "\"}";
  }
  return "\"" + name + "\": {\"n\": " + std::to_string(n) + ", \"k\": " + std::to_string(k) + ", \"segments\": [" +
         segments + "]}";
}

/// ", "field": "tensor""
inline std::string named(const std::string& field, const std::string& tensor) {
  return ", \"" + field + "\": \"" + tensor + "\"";
}

/// The ops of a layer whose input is in buffer `hidden`, which becomes that of its output.
inline std::string TinyModel::layer_ops(int layer, int& hidden) const {
  const std::string l = "layers." + std::to_string(layer) + ".";
  const auto name = named;
  std::ostringstream heads;
  heads << "\"layer\": " << layer << ", \"num_heads\": " << spec.heads << ", \"num_kv_heads\": " << spec.kv_heads
        << ", \"head_dim\": " << spec.head_dim;
  std::ostringstream ops;
  ops << ",\n{\"op\": \"norm_qkv_rope\", \"in\": " << hidden << ", \"out\": 1, \"eps\": 1e-5, \"rope\": 0, "
      << heads.str() << name("norm", l + "attn_norm") << name("linear", l + "qkv");
  if (spec.bias) ops << name("bias", l + "qkv.bias");
  if (spec.qk_norm) ops << name("q_norm", l + "q_norm") << name("k_norm", l + "k_norm") << ", \"qk_norm_eps\": 1e-5";
  ops << "},\n{\"op\": \"paged_attention\", \"in\": 1, \"out\": 2, \"scale\": 0.3, \"softcap\": "
      << spec.attention_softcap << ", \"window\": " << (layer % 2 == 1 ? spec.window : 0) << ", " << heads.str();
  ops << "},\n{\"op\": \"linear_residual\", \"in\": 2, \"residual\": " << hidden << ", \"out\": " << hidden
      << name("linear", l + "o");
  if (spec.bias) ops << name("bias", l + "o.bias");
  if (spec.post_norm) ops << name("post_norm", l + "post_attn") << ", \"eps\": 1e-5";
  ops << "}" << feed_forward_ops(layer, hidden);
  return ops.str();
}

inline std::string TinyModel::feed_forward_ops(int layer, int& hidden) const {
  const std::string l = "layers." + std::to_string(layer) + ".";
  const auto name = named;
  std::ostringstream ops;
  if (spec.has_experts(layer)) {
    const int out = hidden == 0 ? 4 : 0;
    ops << ",\n{\"op\": \"norm_moe\", \"in\": " << hidden << ", \"residual\": " << hidden << ", \"out\": " << out
        << ", \"eps\": 1e-5" << name("norm", l + "mlp_norm") << name("router", l + "router")
        << ", \"num_experts\": " << spec.experts << ", \"top_k\": " << spec.top_k
        << ", \"normalize\": " << (spec.normalize ? "true" : "false") << name("gate", l + "experts.gate")
        << name("up", l + "experts.up") << name("down", l + "experts.down") << name("activation", spec.activation)
        << "}";
    hidden = out;
    return ops.str();
  }
  ops << ",\n{\"op\": \"norm_swiglu\", \"in\": " << hidden << ", \"out\": 3, \"eps\": 1e-5"
      << name("norm", l + "mlp_norm") << name("gate", l + "gate") << name("up", l + "up")
      << name("activation", spec.activation);
  if (spec.bias) ops << name("gate_bias", l + "gate.bias") << name("up_bias", l + "up.bias");
  ops << "},\n{\"op\": \"linear_residual\", \"in\": 3, \"residual\": " << hidden << ", \"out\": " << hidden
      << name("linear", l + "down");
  if (spec.post_norm) ops << name("post_norm", l + "post_mlp") << ", \"eps\": 1e-5";
  ops << "}";
  return ops.str();
}

inline std::string TinyModel::plan() const {
  // Buffers: 0 hidden, 1 q, 2 attention, 3 mlp; mlp takes over the bytes of q and attention. Where there are experts, 4
  // is what they make of 0, and the other way round.
  const int q = spec.heads * spec.head_dim;
  const auto bytes = [&](int width) { return (4 * width * spec.max_num_tokens + 63) / 64 * 64; };
  const int q_at = bytes(spec.hidden);
  const int attention_at = q_at + bytes(q);
  const int second_at = std::max(attention_at + bytes(q), q_at + bytes(spec.intermediate));
  const int end = second_at + (spec.experts > 0 ? bytes(spec.hidden) : 0);
  std::ostringstream out;
  out << "{\"version\": 1, \"target\": \"cpu\", \"vocab_size\": " << spec.vocab << ", \"hidden_size\": " << spec.hidden
      << ", \"max_seq_len\": " << spec.max_seq_len << ", \"max_num_tokens\": " << spec.max_num_tokens
      << ", \"max_batch_size\": 16,\n\"arena_bytes\": " << end
      << ",\n\"buffers\": [{\"name\": \"hidden\", \"width\": " << spec.hidden
      << ", \"offset\": 0}, {\"name\": \"q\", \"width\": " << q << ", \"offset\": " << q_at
      << "}, {\"name\": \"attention\", \"width\": " << q << ", \"offset\": " << attention_at
      << "}, {\"name\": \"mlp\", \"width\": " << spec.intermediate << ", \"offset\": " << q_at << "}";
  if (spec.experts > 0) {
    out << ", {\"name\": \"second\", \"width\": " << spec.hidden << ", \"offset\": " << second_at << "}";
  }
  out << "],\n\"rope\": [{\"inv_freq\": \"inv_freq\", \"attention_factor\": 1.0}],\n\"kv\": {\"dtype\": \""
      << spec.kv_dtype << "\", \"tokens_per_block\": 16, \"layers\": [";
  for (int layer = 0; layer < spec.layers; ++layer) {
    out << (layer == 0 ? "" : ", ") << "{\"num_kv_heads\": " << spec.kv_heads << ", \"head_dim\": " << spec.head_dim
        << ", \"window\": " << (layer % 2 == 1 ? spec.window : 0) << "}";
  }
  out << "]},\n\"linears\": {" << linear("embedding", {"embedding"});
  for (int layer = 0; layer < spec.layers; ++layer) {
    const std::string l = "layers." + std::to_string(layer) + ".";
    out << ",\n" << linear(l + "qkv", {l + "q", l + "k", l + "v"});
    out << ", " << linear(l + "o", {l + "o"});
    for (const char* part : {"gate", "up", "down"}) {
      std::vector<std::string> parts;
      for (const std::string& mlp : mlps(layer)) parts.push_back(mlp + part);
      out << ", " << linear(l + (spec.has_experts(layer) ? "experts." : "") + part, parts);
    }
  }
  out << "},\n\"ops\": [\n{\"op\": \"embedding\", \"out\": 0, \"linear\": \"embedding\", \"scale\": "
      << spec.embedding_scale << "}";
  int hidden = 0;
  for (int layer = 0; layer < spec.layers; ++layer) out << layer_ops(layer, hidden);
  out << ",\n{\"op\": \"lm_head\", \"in\": " << hidden
      << ", \"eps\": 1e-5, \"norm\": \"final_norm\", \"linear\": \"embedding\", "
         "\"softcap\": "
      << spec.final_softcap << ", \"vocab_size\": " << spec.vocab << (spec.bias ? ", \"bias\": \"lm_head.bias\"" : "")
      << "}]}";
  return out.str();
}

}  // namespace aotllm::testing_support
