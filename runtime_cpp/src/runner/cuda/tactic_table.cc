#include "runner/cuda/tactic_table.h"

#include <utility>

#include "support/json.h"

namespace aotllm::cuda {
namespace {

constexpr const char* kFileName = "tactics.json";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMaxDimension = std::int64_t{1} << 24;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 20;

MatrixFormat parse_format(const JsonField& field) {
  for (const MatrixFormat format :
       {MatrixFormat::kBf16, MatrixFormat::kFp8, MatrixFormat::kFp8Block, MatrixFormat::kInt8, MatrixFormat::kInt4}) {
    if (field.string() == format_name(format)) return format;
  }
  field.fail("bf16, fp8, fp8_block, int8 or int4");
}

MeasuredTactics parse_entry(const JsonField& field) {
  field.only({"format", "n", "k", "tactics"});
  MeasuredTactics entry;
  entry.format = parse_format(field.at("format"));
  entry.n = static_cast<int>(field.at("n").integer(1, kMaxDimension));
  entry.k = static_cast<int>(field.at("k").integer(1, kMaxDimension));
  const JsonField tactics = field.at("tactics");
  std::int64_t least = 1;
  for (std::size_t i = 0; i < tactics.size(); ++i) {
    const JsonField tactic = tactics[i];
    tactic.only({"max_rows", "kernel", "seconds"});
    const std::int64_t max_rows = tactic.at("max_rows").integer(least, kMaxRows);
    entry.tactics.push_back({static_cast<int>(max_rows), tactic.at("kernel").string()});
    entry.seconds.push_back(tactic.at("seconds").number(0.0, 1e6));
    least = max_rows + 1;
  }
  return entry;
}

}  // namespace

const char* format_name(MatrixFormat format) noexcept {
  switch (format) {
    case MatrixFormat::kBf16:
      return "bf16";
    case MatrixFormat::kFp8:
      return "fp8";
    case MatrixFormat::kFp8Block:
      return "fp8_block";
    case MatrixFormat::kInt8:
      return "int8";
    case MatrixFormat::kInt4:
      return "int4";
  }
  return "";
}

TacticTable TacticTable::parse(const std::string& text) {
  TacticTable table;
  if (text.empty()) return table;
  const Json json = Json::parse(text, kFileName);
  const JsonField root(json, kFileName);
  root.only({"version", "device", "linears"});
  root.at("version").integer(kVersion, kVersion);
  const JsonField linears = root.at("linears");
  for (std::size_t i = 0; i < linears.size(); ++i) table.entries_.push_back(parse_entry(linears[i]));
  return table;
}

const std::vector<Tactic>& TacticTable::find(const Linear& linear) const {
  for (const MeasuredTactics& entry : entries_) {
    if (entry.format == linear.matrix.format && entry.n == linear.n && entry.k == linear.k) return entry.tactics;
  }
  return linear.tactics;
}

}  // namespace aotllm::cuda
