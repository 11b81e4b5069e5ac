#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "engine/plan_reader.h"
#include "support/strings.h"

namespace aotllm {
namespace {

struct Access {
  std::vector<int> reads;
  int writes = -1;    ///< -1: none
  int in_place = -1;  ///< a read buffer that may be the written one
};

struct AccessOf {
  Access operator()(const EmbeddingOp& op) const { return {{}, op.out, -1}; }
  Access operator()(const NormQkvRopeOp& op) const { return {{op.in}, op.out, -1}; }
  Access operator()(const PagedAttentionOp& op) const { return {{op.in}, op.out, -1}; }
  Access operator()(const LinearResidualOp& op) const { return {{op.in, op.residual}, op.out, op.residual}; }
  Access operator()(const NormSwigluOp& op) const { return {{op.in}, op.out, -1}; }
  Access operator()(const NormMoeOp& op) const { return {{op.in, op.residual}, op.out, -1}; }
  Access operator()(const LmHeadOp& op) const { return {{op.in}, -1, -1}; }
};

class Dataflow {
 public:
  Dataflow(const Plan& plan, const std::string& path)
      : plan_(plan), path_(path), live_(plan.buffers.size(), 0), kv_written_(plan.kv.layers.size(), 0) {
    if (plan.entering >= 0) live_[plan.entering] = 1;
  }

  void check() {
    for (index_ = 0; index_ < plan_.ops.size(); ++index_) {
      check_ends();
      check_buffers(std::visit(AccessOf{}, plan_.ops[index_]));
      check_layer();
    }
    index_ = plan_.ops.size();
    if (plan_.ops.empty()) fail("a plan has an embedding and an lm_head, got no ops");
    if (plan_.leaving >= 0 && !live_[plan_.leaving]) {
      fail(cat("buffer \"", plan_.buffers[plan_.leaving].name, "\", which leaves the stage, holds nothing"));
    }
    for (int layer = plan_.layer_begin; layer < plan_.layer_end; ++layer) {
      if (kv_written_[layer] != 2) fail(cat("layer ", layer, " of kv.layers has no norm_qkv_rope and paged_attention"));
    }
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw Error(ErrorKind::kEngine, cat(path_, '[', index_, "]: ", reason));
  }

  void check_ends() const {
    const Op& op = plan_.ops[index_];
    const bool begins = index_ == 0 && plan_.is_first_stage();
    const bool ends = index_ + 1 == plan_.ops.size() && plan_.is_last_stage();
    if (std::holds_alternative<EmbeddingOp>(op) != begins) {
      fail("the first op, and no other, is an embedding, on the first stage only");
    }
    if (std::holds_alternative<LmHeadOp>(op) != ends)
      fail("the last op, and no other, is an lm_head, on the last stage only");
  }

  bool overlap(int a, int b) const {
    const Buffer& x = plan_.buffers[a];
    const Buffer& y = plan_.buffers[b];
    return x.offset < y.offset + plan_.buffer_bytes(y) && y.offset < x.offset + plan_.buffer_bytes(x);
  }

  void check_buffers(const Access& access) {
    for (const int b : access.reads) {
      if (!live_[b]) fail(cat("reads buffer \"", plan_.buffers[b].name, "\", which holds nothing at this point"));
      const bool in_place = b == access.in_place && b == access.writes;
      if (access.writes >= 0 && !in_place && overlap(b, access.writes)) {
        fail(cat("writes buffer \"", plan_.buffers[access.writes].name, "\" over its input \"", plan_.buffers[b].name,
                 '"'));
      }
    }
    if (access.writes < 0) return;
    for (std::size_t b = 0; b < live_.size(); ++b) {
      if (live_[b] && overlap(static_cast<int>(b), access.writes)) live_[b] = 0;
    }
    live_[access.writes] = 1;
  }

  void check_layer() {
    if (const auto* qkv = std::get_if<NormQkvRopeOp>(&plan_.ops[index_])) {
      if (kv_written_[qkv->layer] != 0) fail(cat("layer ", qkv->layer, " writes its keys and values twice"));
      kv_written_[qkv->layer] = 1;
    } else if (const auto* attention = std::get_if<PagedAttentionOp>(&plan_.ops[index_])) {
      if (kv_written_[attention->layer] == 0)
        fail(cat("attends to layer ", attention->layer, " before its norm_qkv_rope"));
      kv_written_[attention->layer] = 2;
    }
  }

  const Plan& plan_;
  const std::string& path_;
  std::size_t index_ = 0;
  std::vector<char> live_;        ///< per buffer: holds a value
  std::vector<char> kv_written_;  ///< per layer: 1 = written, 2 = and read
};

}  // namespace

void check_dataflow(const Plan& plan, const std::string& path) {
  Dataflow(plan, path).check();
}

}  // namespace aotllm
