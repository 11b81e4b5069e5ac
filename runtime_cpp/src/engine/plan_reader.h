#pragma once

#include <map>
#include <string>
#include <string_view>

#include "engine/plan.h"
#include "support/json.h"

namespace aotllm {

/// Bounds of the plan's integers: far above any model, low enough that products of three fit 64 bits.
inline constexpr std::int64_t kMaxDimension = std::int64_t{1} << 24;

/// Looks up what the fields of a plan name. Shared by the readers of tables (plan.cc) and of ops (plan_ops.cc).
class PlanReader {
 public:
  PlanReader(const SafeTensors& file, Plan& plan) : file_(file), plan_(plan) {}

  Plan& plan() noexcept { return plan_; }

  /// A tensor named by `field`.
  const Tensor& tensor(const JsonField& field) const;
  /// A float32 tensor [size] named by `field`.
  std::span<const float> vector(const JsonField& field, std::int64_t size) const;
  /// A float32 tensor [rows, columns] named by `field`.
  std::span<const float> matrix(const JsonField& field, std::int64_t rows, std::int64_t columns) const;
  /// As `vector` where `owner` has the member `key`; else empty.
  std::span<const float> optional_vector(const JsonField& owner, std::string_view key, std::int64_t size) const;
  /// Index of a buffer that is `width` wide.
  int buffer(const JsonField& field, std::int64_t width) const;
  int buffer(const JsonField& field) const;
  /// Index of the linear named by `field`.
  int linear(const JsonField& field) const;
  void add_linear(Linear linear);
  /// Null where there is none of this name.
  Linear* find_linear(const std::string& name);

  const SafeTensors& file() const noexcept { return file_; }

 private:
  const SafeTensors& file_;
  Plan& plan_;
  std::map<std::string, int, std::less<>> linear_index_;
};

/// Reads one op record. Throws Error(kEngine).
Op read_op(PlanReader& reader, const JsonField& field);

/// Proves the order of the ops: embedding first, lm_head last, each layer's K and V written before they are read, and
/// no op reads a buffer that was not written or whose bytes were reused since. Throws Error(kEngine) with `path`.
void check_dataflow(const Plan& plan, const std::string& path);

}  // namespace aotllm
