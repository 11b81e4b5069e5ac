#include "aotllm/cpu_tuner.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <utility>

#include "runner/cpu_tactics_file.h"
#include "runner/linear.h"
#include "runner/rank_files.h"
#include "runner/step_bench.h"
#include "support/cpu_topology.h"

namespace aotllm {
namespace {

using Clock = std::chrono::steady_clock;

/// Rows of the steps that are timed; what is best for more than the last is taken to be what is best for it.
constexpr std::array<int, 6> kRowCounts = {1, 4, 16, 64, 256, 512};
/// Tiles beside the default, most promising first.
constexpr std::array<TileShape, 9> kTiles = {
    {{32, 8}, {32, 2}, {64, 4}, {16, 8}, {32, 16}, {64, 8}, {16, 4}, {64, 2}, {32, 1}}};
/// Turns of a comparison.
constexpr int kLeastTurns = 6;
constexpr int kMostTurns = 16;
/// Of the time, what is left for a second look at what was chosen: what disturbs the first one may last for seconds.
constexpr double kSecondLook = 0.2;
/// Less time than for so many steps in turns is not worth to begin.
constexpr int kComparisons = 4;
/// What another candidate than the default must save to be taken: less is noise.
constexpr double kLeastGain = 0.02;
/// Who takes so much longer than the default is out of the race.
constexpr double kHopeless = 1.2;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// The median saves kLeastGain of the default's time, and four of five turns are won. Both are by turn.
bool wins(const std::vector<double>& seconds, const std::vector<double>& default_seconds) {
  if (seconds.size() < kLeastTurns) return false;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < seconds.size(); ++i) ratios.push_back(seconds[i] / default_seconds[i]);
  std::ranges::sort(ratios);
  return ratios[ratios.size() / 2] < 1.0 - kLeastGain && ratios[ratios.size() * 4 / 5] < 1.0;
}

/// The fastest of those that win against the first; 0 where none does.
std::size_t winner(const std::vector<std::vector<double>>& seconds) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < seconds.size(); ++i) {
    if (wins(seconds[i], seconds[0]) && (best == 0 || median(seconds[i]) < median(seconds[best]))) best = i;
  }
  return best;
}

/// How steps of one number of rows are run.
struct Setting {
  int threads = 0;
  bool owns_rows = false;
  std::map<std::string, LinearTactic> linears;  ///< by shape_of; others have the default

  bool operator==(const Setting& other) const {
    return threads == other.threads && owns_rows == other.owns_rows && linears.empty() && other.linears.empty();
  }
};

/// Calls time(candidate) for each of `count` in turns until `end`, though at least kLeastTurns; it adds a sample and
/// returns the seconds of a step. The first candidate is the default.
template <class Time>
void take_turns(std::size_t count, Clock::time_point end, Time&& time) {
  std::vector<int> hopeless_turns(count, 0);  // one may be somebody else's fault
  double default_seconds = 0.0;
  for (int turn = 0; turn < kMostTurns && (turn < kLeastTurns || Clock::now() < end); ++turn) {
    for (std::size_t i = 0; i < count; ++i) {
      if (hopeless_turns[i] > 1) continue;
      const double seconds = time(i);
      if (i == 0) default_seconds = seconds;
      if (seconds > kHopeless * default_seconds) ++hopeless_turns[i];
    }
  }
}

class Tuner {
 public:
  Tuner(const std::string& rank_file, int num_threads) : Tuner(load_ranks(rank_file), num_threads) {}

  CpuTuning run(Clock::duration time) {
    const auto begin = Clock::now();
    search(begin + std::chrono::duration_cast<Clock::duration>((1.0 - kSecondLook) * time));
    for (std::size_t i = 0; i < tuned_.size(); ++i) {
      const auto left = begin + time - Clock::now();
      confirm(tuned_[i], Clock::now() + left / static_cast<int>(tuned_.size() - i));
    }
    return result();
  }

 private:
  /// What was found for some number of rows.
  struct Tuned {
    int rows = 0;
    Setting setting;
    double seconds = 0.0;
    double default_seconds = 0.0;
    std::map<std::string, double> shapes;  ///< shape_of → seconds of a product, of what is set
  };

  Tuner(std::vector<Engine> ranks, int num_threads)
      : shapes_(shapes_of(ranks)),
        own_rows_(default_own_rows(ranks.front().plan().linears, cpu::kernels())),
        bench_(std::move(ranks), num_threads, kRowCounts.back()) {}

  static std::map<std::string, Linear> shapes_of(const std::vector<Engine>& ranks) {
    std::map<std::string, Linear> shapes;
    for (const Engine& rank : ranks) {
      for (const Linear& linear : rank.plan().linears) shapes.emplace(shape_of(linear), linear);
    }
    return shapes;
  }

  int most_threads() const { return bench_.runner().num_threads(); }

  std::vector<int> row_counts() const {
    std::vector<int> counts;
    for (const int rows : kRowCounts) {
      if (rows <= bench_.max_rows()) counts.push_back(rows);
    }
    return counts;
  }

  Setting default_setting(int rows, int threads) const {
    const int of_rank = threads / bench_.ranks_of_stage();
    return {threads, of_rank > 1 && rows / of_rank >= own_rows_, {}};
  }

  CpuTactics tactics(const Setting& setting) const {
    CpuTactics tactics;
    tactics.own_rows = setting.owns_rows ? 1 : INT_MAX;
    tactics.steps = {{INT_MAX, setting.threads}};
    for (const auto& [shape, tactic] : setting.linears) tactics.linears.push_back(shape_tactics(shape, {tactic}));
    return tactics;
  }

  ShapeTactics shape_tactics(const std::string& shape, std::vector<LinearTactic> tactics) const {
    const Linear& linear = shapes_.at(shape);
    return {format_of(linear), linear.n, linear.k, std::move(tactics)};
  }

  LinearTactic default_tactic(const std::string& shape, int rows) const {
    LinearTactic tactic = PlanTactics::default_tactic(shapes_.at(shape), rows, cpu::kernels());
    tactic.max_rows = INT_MAX;
    return tactic;
  }

  /// Of a step: one may be the first, or somebody else's fault, and must not end the search.
  double quickest_of_three(int rows) {
    double quickest = bench_.seconds(rows, {});
    for (int again = 0; again < 2; ++again) quickest = std::min(quickest, bench_.seconds(rows, {}));
    return quickest;
  }

  void search(Clock::time_point end) {
    for (const int rows : row_counts()) {
      const double step = quickest_of_three(rows);
      const auto left = std::chrono::duration<double>(end - Clock::now()).count();
      const auto share = left / static_cast<double>(row_counts().size() - tuned_.size());
      if (kComparisons * kLeastTurns * step > share) break;
      tune_rows(rows, step, std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(share)));
    }
  }

  /// Keeps what was chosen if it wins once more, some time later.
  void confirm(Tuned& tuned, Clock::time_point end) {
    const Setting start = default_setting(tuned.rows, most_threads());
    if (tuned.setting == start) return;
    const std::vector<Setting> candidates = {start, tuned.setting};
    const std::vector<std::vector<double>> seconds = compare(tuned.rows, candidates, end);
    const std::size_t best = winner(seconds);
    tuned.setting = candidates[best];
    tuned.seconds = median(seconds[best]);
    tuned.default_seconds = median(seconds[0]);
  }

  void tune_rows(int rows, double step, Clock::duration time) {
    Tuned& tuned = tuned_.emplace_back();
    tuned.rows = rows;
    const Setting start = default_setting(rows, most_threads());
    const auto begin = Clock::now();
    Setting setting = choose_threads(rows, start, step, begin + time / 4);
    setting = choose_owner(rows, setting, begin + time * 3 / 8);
    std::vector<Setting> finalists = {start};
    if (!(setting == start)) finalists.push_back(setting);
    const Setting with_linears = choose_linears(tuned, setting, step, begin + time * 3 / 4);
    if (!with_linears.linears.empty()) finalists.push_back(with_linears);

    const std::vector<std::vector<double>> seconds = compare(rows, finalists, begin + time);
    const std::size_t best = winner(seconds);
    tuned.setting = finalists[best];
    tuned.seconds = median(seconds[best]);
    tuned.default_seconds = median(seconds[0]);
  }

  /// No fewer threads than fewer rows have.
  Setting choose_threads(int rows, const Setting& start, double step, Clock::time_point end) {
    const int least = tuned_.size() > 1 ? tuned_[tuned_.size() - 2].setting.threads : bench_.ranks_of_stage();
    std::vector<Setting> candidates = {start};
    const int most = most_threads();
    for (const int threads : {most - 1, most * 3 / 4, most / 2, most / 4, most / 8, most / 16}) {
      if (threads < std::max(least, 1) || threads == candidates.back().threads) continue;
      candidates.push_back(default_setting(rows, threads));
    }
    candidates.resize(std::min(candidates.size(), affordable(step, end)));
    return candidates[fastest(rows, candidates, end)];
  }

  Setting choose_owner(int rows, const Setting& setting, Clock::time_point end) {
    const int of_rank = setting.threads / bench_.ranks_of_stage();
    if (of_rank < 2 || rows < 4 * of_rank) return setting;
    std::vector<Setting> candidates(2, setting);
    candidates.back().owns_rows = !setting.owns_rows;
    return candidates[fastest(rows, candidates, end)];
  }

  std::size_t fastest(int rows, const std::vector<Setting>& candidates, Clock::time_point end) {
    return candidates.size() < 2 ? 0 : winner(compare(rows, candidates, end));
  }

  /// Seconds of a step by candidate, by turn.
  std::vector<std::vector<double>> compare(int rows, const std::vector<Setting>& candidates, Clock::time_point end) {
    std::vector<std::vector<double>> seconds(candidates.size());
    take_turns(candidates.size(), end, [&](std::size_t i) {
      seconds[i].push_back(bench_.seconds(rows, tactics(candidates[i])));
      return seconds[i].back();
    });
    return seconds;
  }

  /// Candidates that can be compared until `end`.
  static std::size_t affordable(double step, Clock::time_point end) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    return static_cast<std::size_t>(std::max(left / (kLeastTurns * step), 1.0));
  }

  /// All linears of a step have a candidate at a time; each takes what is best for it.
  Setting choose_linears(Tuned& tuned, const Setting& setting, double step, Clock::time_point end) {
    const std::size_t affordable = Tuner::affordable(step, end);
    std::vector<Setting> candidates = {setting};
    add_kernels(tuned.rows, candidates);
    const std::size_t first_tile = candidates.size();
    add_tiles(tuned.rows, candidates);
    candidates.resize(std::min(candidates.size(), affordable));

    std::map<std::string, std::vector<std::vector<double>>> seconds;  // shape → candidate → by turn
    take_turns(candidates.size(), end, [&](std::size_t i) {
      const StepBench::Profile profile = bench_.profile(tuned.rows, tactics(candidates[i]), setting.threads);
      for (const auto& [shape, its_seconds] : profile.shapes) {
        seconds.try_emplace(shape, candidates.size()).first->second[i].push_back(its_seconds);
      }
      return profile.seconds;
    });
    Setting chosen = setting;
    for (auto& [shape, by_candidate] : seconds) {
      for (std::size_t i = 1; i < candidates.size(); ++i) {
        if (!candidates[i].linears.contains(shape)) by_candidate[i].clear();  // no candidate for this one
      }
      std::size_t best = winner(by_candidate);
      tuned.shapes[shape] = median(by_candidate[best]);
      if (best == 0) continue;
      LinearTactic tactic = candidates[best].linears.at(shape);
      // The best tile, whichever kernels were the best with the default one.
      by_candidate.resize(std::min(by_candidate.size(), first_tile));
      if (const std::size_t kernels = winner(by_candidate); kernels != 0) {
        tactic.kernels = candidates[kernels].linears.at(shape).kernels;
      }
      chosen.linears[shape] = tactic;
    }
    return chosen;
  }

  void add_kernels(int rows, std::vector<Setting>& candidates) const {
    const Setting start = candidates.front();
    for (std::size_t i = 0;; ++i) {
      Setting next = start;
      for (const auto& [shape, linear] : shapes_) {
        LinearTactic tactic = default_tactic(shape, rows);
        std::vector<const cpu::Kernels*> kernels = other_kernels(linear, cpu::kernels());
        kernels.insert(kernels.begin(), &cpu::kernels());
        std::erase_if(kernels, [&](const cpu::Kernels* k) { return k == tactic.kernels; });
        if (i >= kernels.size()) continue;
        tactic.kernels = kernels[i];
        next.linears[shape] = tactic;
      }
      if (next.linears.empty()) return;
      candidates.push_back(std::move(next));
    }
  }

  void add_tiles(int rows, std::vector<Setting>& candidates) const {
    const Setting start = candidates.front();
    std::vector<std::pair<int, int>> seen = {{std::min(rows, kTileRows), kTilePanels}};
    for (const TileShape& tile : kTiles) {
      const std::pair<int, int> different{std::min(rows, tile.rows), tile.panels};
      if (std::ranges::find(seen, different) != seen.end()) continue;
      seen.push_back(different);
      Setting next = start;
      for (const auto& [shape, linear] : shapes_) {
        LinearTactic tactic = default_tactic(shape, rows);
        tactic.tile = tile;
        next.linears[shape] = tactic;
      }
      candidates.push_back(std::move(next));
    }
  }

  /// The least rows of a thread from which rows are its own that agrees with what was found, next to the default.
  int own_rows() const {
    int shared = 0;
    int own = INT_MAX;
    for (const Tuned& tuned : tuned_) {
      const int each = tuned.rows / std::max(tuned.setting.threads / bench_.ranks_of_stage(), 1);
      if (tuned.setting.owns_rows) {
        own = std::min(own, each);
      } else if (tuned.setting.threads > bench_.ranks_of_stage()) {
        shared = std::max(shared, each);
      }
    }
    return shared < own ? std::clamp(own_rows_, shared + 1, own) : own_rows_;
  }

  CpuTuning result() const {
    CpuTuning result;
    result.device = tuned_device(cpu::kernels());
    result.threads = most_threads();
    result.own_rows = own_rows();
    for (const Tuned& tuned : tuned_) {
      result.steps.push_back({tuned.rows, tuned.setting.threads, tuned.seconds, tuned.default_seconds});
    }
    for (const auto& [shape, linear] : shapes_) {
      const auto is_set = [&](const Tuned& tuned) { return tuned.setting.linears.contains(shape); };
      if (std::ranges::none_of(tuned_, is_set)) continue;
      TunedLinear& entry = result.linears.emplace_back(TunedLinear{format_of(linear), linear.n, linear.k, {}});
      for (const Tuned& tuned : tuned_) {
        const LinearTactic tactic = is_set(tuned) ? tuned.setting.linears.at(shape) : default_tactic(shape, tuned.rows);
        const auto seconds = tuned.shapes.find(shape);
        if (seconds == tuned.shapes.end()) continue;  // the head of a prompt
        entry.choices.push_back({tuned.rows, tactic_name(tactic, cpu::kernels()), seconds->second});
      }
    }
    return result;
  }

  std::map<std::string, Linear> shapes_;
  int own_rows_;  ///< by default
  StepBench bench_;
  std::vector<Tuned> tuned_;  ///< by rows, ascending
};

}  // namespace

CpuTuning tune_cpu(const std::string& rank_file, const CpuTunerOptions& options) {
  const std::chrono::duration<double> time(options.seconds);
  return Tuner(rank_file, options.num_threads).run(std::chrono::duration_cast<Clock::duration>(time));
}

}  // namespace aotllm
