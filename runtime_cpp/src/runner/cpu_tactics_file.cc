#include "runner/cpu_tactics_file.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>
#include <utility>

#include "aotllm/errors.h"
#include "runner/linear.h"
#include "support/cpu_name.h"
#include "support/json.h"
#include "support/strings.h"

namespace aotllm {
namespace {

constexpr const char* kFileName = "tactics.json";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMaxDimension = std::int64_t{1} << 30;
constexpr std::int64_t kMaxRows = INT_MAX;
constexpr std::int64_t kMaxThreads = 4096;
constexpr const char* kRemedy = "; the defaults are used: run 'aotllm tune' here";

/// Reads a number from 1 to `most` off the front of `text`; 0 where there is none.
int take_number(std::string_view& text, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 1 || value > most) return 0;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

/// Reads "ISA.ROWSxPANELS"; an ISA without kernels here goes to `lacking`.
void read_kernel(const JsonField& field, LinearTactic& tactic, std::string& lacking) {
  std::string_view text = field.string();
  const std::string_view isa = text.substr(0, text.find('.'));
  text.remove_prefix(std::min(isa.size() + 1, text.size()));
  tactic.tile.rows = take_number(text, kMaxTileRows);
  const bool has_times = text.starts_with('x');
  text.remove_prefix(has_times ? 1 : 0);
  tactic.tile.panels = has_times ? take_number(text, kMaxTilePanels) : 0;
  if (std::ranges::find(cpu::kIsaNames, isa) == std::end(cpu::kIsaNames) || tactic.tile.rows == 0 ||
      tactic.tile.panels == 0 || !text.empty()) {
    field.fail(cat("\"ISA.ROWSxPANELS\" of an instruction set of target cpu, at most ", kMaxTileRows, " rows and ",
                   kMaxTilePanels, " panels"));
  }
  tactic.kernels = cpu::kernels_for(std::string(isa).c_str());
  if (tactic.kernels == nullptr) lacking = isa;
}

/// Calls read(element, max_rows) for each element of a list by `max_rows`, ascending.
template <class Read>
void for_each_row_count(const JsonField& list, Read&& read) {
  std::int64_t least = 1;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const JsonField element = list[i];
    const std::int64_t max_rows = element.at("max_rows").integer(least, kMaxRows);
    read(element, static_cast<int>(max_rows));
    least = max_rows + 1;
  }
}

void read_seconds(const JsonField& field, const char* key) {
  field.at(key).number(0.0, 1e6);
}

ShapeTactics read_linear(const JsonField& field, std::string& lacking) {
  field.only({"format", "n", "k", "tactics"});
  ShapeTactics shape;
  shape.format = field.at("format").string();
  shape.n = static_cast<int>(field.at("n").integer(1, kMaxDimension));
  shape.k = static_cast<int>(field.at("k").integer(1, kMaxDimension));
  for_each_row_count(field.at("tactics"), [&](const JsonField& element, int max_rows) {
    element.only({"max_rows", "kernel", "seconds"});
    read_seconds(element, "seconds");
    LinearTactic& tactic = shape.tactics.emplace_back();
    tactic.max_rows = max_rows;
    read_kernel(element.at("kernel"), tactic, lacking);
  });
  return shape;
}

}  // namespace

std::string tuned_device(const cpu::Kernels& kernels) {
  return cat(cpu_brand(), ", ", kernels.isa);
}

std::string tactic_name(const LinearTactic& tactic, const cpu::Kernels& kernels) {
  const cpu::Kernels& its = tactic.kernels == nullptr ? kernels : *tactic.kernels;
  return cat(its.isa, ".", tactic.tile.rows, "x", tactic.tile.panels);
}

TacticsFile TacticsFile::parse(const std::string& text) try {
  const Json json = Json::parse(text, kFileName);
  const JsonField root(json, kFileName);
  root.only({"version", "device", "threads", "own_rows", "steps", "linears"});
  root.at("version").integer(kVersion, kVersion);
  TacticsFile file;
  file.device = root.at("device").string();
  file.threads = static_cast<int>(root.at("threads").integer(1, kMaxThreads));
  file.tactics.own_rows = static_cast<int>(root.at("own_rows").integer(1, kMaxRows));
  for_each_row_count(root.at("steps"), [&](const JsonField& element, int max_rows) {
    element.only({"max_rows", "threads", "seconds", "default_seconds"});
    read_seconds(element, "seconds");
    read_seconds(element, "default_seconds");
    file.tactics.steps.push_back({max_rows, static_cast<int>(element.at("threads").integer(1, file.threads))});
  });
  const JsonField linears = root.at("linears");
  for (std::size_t i = 0; i < linears.size(); ++i) {
    file.tactics.linears.push_back(read_linear(linears[i], file.lacking));
  }
  return file;
} catch (const Error& error) {
  throw Error(error.kind(), cat(error.what(), "; run 'aotllm tune' again"));
}

std::string TacticsFile::why_unfit(const cpu::Kernels& kernels, int num_threads,
                                   std::span<const Plan* const> plans) const {
  if (const std::string here = tuned_device(kernels); device != here) {
    return cat("tuned on ", device, ", this is ", here, kRemedy);
  }
  if (threads != num_threads) {
    return cat("tuned for ", threads, " threads, the engine runs on ", num_threads, kRemedy, " with --num-threads ",
               num_threads);
  }
  if (!lacking.empty()) return cat("it has kernels for ", lacking, ", which this build of aotllm lacks", kRemedy);
  for (const ShapeTactics& shape : tactics.linears) {
    const auto has_it = [&](const Plan* plan) {
      return std::ranges::any_of(plan->linears, [&](const Linear& linear) { return shape.is_of(linear); });
    };
    if (std::ranges::none_of(plans, has_it)) {
      return cat("made for another engine: this one has no matrix ", shape.n, "x", shape.k, " ", shape.format, kRemedy);
    }
  }
  return {};
}

}  // namespace aotllm
