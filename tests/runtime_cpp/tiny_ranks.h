#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tiny_model.h"

namespace aotllm::testing_support {

/// How a tiny model is split; all counts of its spec are multiples of `tp`.
struct Split {
  int tp = 1;
  int pp = 1;  ///< at most its layers; stages have layers / pp of them, the last one the rest
};

inline Matrix rows_of(const Matrix& m, int begin, int end) {
  return {
      end - begin, m.k, {m.values.begin() + std::ptrdiff_t{begin} * m.k, m.values.begin() + std::ptrdiff_t{end} * m.k}};
}

inline Matrix columns_of(const Matrix& m, int begin, int end) {
  Matrix cut{m.n, end - begin, {}};
  for (int row = 0; row < m.n; ++row) {
    const auto from = m.values.begin() + std::ptrdiff_t{row} * m.k;
    cut.values.insert(cut.values.end(), from + begin, from + end);
  }
  return cut;
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

/// Engine files of a tiny model's ranks, cut as docs/engine_format.md says.
class TinyRanks {
 public:
  TinyRanks(const TinyModel& whole, const Split& split) : whole_(whole), split_(split) {}

  /// In order of stages, then of ranks.
  std::vector<std::vector<std::uint8_t>> engines() const {
    std::vector<std::vector<std::uint8_t>> files;
    for (int stage = 0; stage < split_.pp; ++stage) {
      for (int rank = 0; rank < split_.tp; ++rank) {
        const TinyModel part = cut(rank);
        files.push_back(part.engine_bytes(plan(part, stage, rank)));
      }
    }
    return files;
  }

 private:
  int share(int count, int rank) const { return count * rank / split_.tp; }

  TinyModel cut(int rank) const {
    TinySpec spec = whole_.spec;
    spec.heads /= split_.tp;
    spec.kv_heads /= split_.tp;
    spec.intermediate /= split_.tp;
    TinyModel part(spec);
    part.inv_freq = whole_.inv_freq;
    part.vectors = whole_.vectors;
    const auto bounds = [&](int count) { return std::pair(share(count, rank), share(count, rank + 1)); };
    for (const auto& [name, m] : whole_.matrices) {
      const bool by_columns = name.ends_with(".o") || name.ends_with(".down");
      const auto [begin, end] = bounds(by_columns ? m.k : m.n);
      part.matrices[name] = by_columns ? columns_of(m, begin, end) : rows_of(m, begin, end);
    }
    const int q = whole_.spec.heads * whole_.spec.head_dim;
    const int kv = whole_.spec.kv_heads * whole_.spec.head_dim;
    for (auto& [name, v] : part.vectors) {
      std::vector<std::pair<int, int>> pieces;  // begin and size of what is cut
      if (name.ends_with("qkv.bias")) pieces = {{0, q}, {q, kv}, {q + kv, kv}};
      if (name.ends_with("gate.bias") || name.ends_with("up.bias") || name == "lm_head.bias") {
        pieces = {{0, static_cast<int>(v.size())}};
      }
      std::vector<float> mine;
      for (const auto& [first, size] : pieces) {
        const auto [begin, end] = bounds(size);
        mine.insert(mine.end(), v.begin() + first + begin, v.begin() + first + end);
      }
      if (!pieces.empty()) v = mine;
    }
    return part;
  }

  std::string plan(const TinyModel& part, int stage, int rank) const {
    std::string text = part.plan();
    if (split_.tp > 1) {
      const std::string first = std::to_string(share(whole_.spec.vocab, rank));
      text = replaced(text, "\"op\": \"embedding\"", "\"op\": \"embedding\", \"vocab_begin\": " + first);
      text = replaced(text, "\"op\": \"linear_residual\"", "\"op\": \"linear_residual\", \"all_reduce\": true");
      text = with_record(text, "tp", split_.tp, rank, "");
    }
    return split_.pp > 1 ? staged(text, stage) : text;
  }

  static std::string with_record(std::string text, const char* name, int size, int rank, const std::string& rest) {
    return text.insert(1, std::string("\"") + name + "\": {\"size\": " + std::to_string(size) +
                              ", \"rank\": " + std::to_string(rank) + rest + "}, ");
  }

  /// The plan with the ops of one stage only: five of each layer, one a line.
  std::string staged(const std::string& text, int stage) const {
    const int begin = whole_.spec.layers / split_.pp * stage;
    const bool is_last = stage + 1 == split_.pp;
    const int end = is_last ? whole_.spec.layers : begin + whole_.spec.layers / split_.pp;
    const std::size_t list = text.find("\"ops\": [") + 8;
    std::vector<std::string> ops;
    for (std::size_t at = text.find("\n{\"op\"", list); at != std::string::npos;) {
      const std::size_t next = text.find("\n{\"op\"", at + 1);
      std::string op = text.substr(at + 1, next == std::string::npos ? text.size() - 2 - (at + 1) : next - at - 1);
      while (op.ends_with(",") || op.ends_with("\n")) op.pop_back();
      ops.push_back(op);
      at = next;
    }
    const int first = stage == 0 ? 0 : 1 + 5 * begin;
    const int last = is_last ? static_cast<int>(ops.size()) : 1 + 5 * end;
    std::string mine;
    for (int i = first; i < last; ++i) {
      mine += i == first ? "\n" : ",\n";
      mine += ops[static_cast<std::size_t>(i)];
    }
    std::string rest = ", \"layers\": [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
    if (stage > 0) rest += ", \"entering\": 0";
    if (!is_last) rest += ", \"leaving\": 0";
    return with_record(text.substr(0, list) + mine + "]}", "pp", split_.pp, stage, rest);
  }

  const TinyModel& whole_;
  Split split_;
};

}  // namespace aotllm::testing_support
