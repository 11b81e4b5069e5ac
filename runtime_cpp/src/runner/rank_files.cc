#include "runner/rank_files.h"

#include <filesystem>
#include <utility>

#include "aotllm/errors.h"
#include "engine/plan.h"
#include "support/strings.h"

namespace aotllm {
namespace {

bool have_equal_sizes(const Plan& a, const Plan& b) {
  return a.target == b.target && a.sm == b.sm && a.tp_size == b.tp_size && a.vocab_size == b.vocab_size &&
         a.hidden_size == b.hidden_size && a.max_seq_len == b.max_seq_len && a.max_num_tokens == b.max_num_tokens &&
         a.max_batch_size == b.max_batch_size && a.kv.layers.size() == b.kv.layers.size() &&
         a.kv.tokens_per_block == b.kv.tokens_per_block && a.kv.groups.size() == b.kv.groups.size();
}

/// The layers of `plan` follow those of the stage before it.
bool follows(const Plan& plan, const std::vector<Engine>& engines) {
  const std::size_t stage_begin = static_cast<std::size_t>(plan.pp_rank) * static_cast<std::size_t>(plan.tp_size);
  const int begin = plan.is_first_stage() ? 0 : engines[stage_begin - 1].plan().layer_end;
  const int end = engines[stage_begin].plan().layer_end;  // the same on all ranks of the stage
  const bool is_whole = !plan.is_last_stage() || end == static_cast<int>(plan.kv.layers.size());
  return plan.layer_begin == begin && plan.layer_end == end && is_whole;
}

}  // namespace

std::vector<Engine> load_ranks(const std::string& rank_file) {
  std::vector<Engine> engines;
  engines.push_back(Engine::load(rank_file));
  const int size = engines.front().plan().num_ranks();
  if (size == 1) return engines;
  engines.clear();
  const std::filesystem::path folder = std::filesystem::path(rank_file).parent_path();
  for (int rank = 0; rank < size; ++rank) {
    engines.push_back(Engine::load((folder / cat("rank", rank, ".engine")).string()));
  }
  check_ranks(engines);
  return engines;
}

void check_ranks(const std::vector<Engine>& engines) {
  if (engines.empty()) throw Error(ErrorKind::kInternal, "an engine has at least one rank");
  const Engine& first = engines.front();
  for (std::size_t rank = 0; rank < engines.size(); ++rank) {
    const Engine& engine = engines[rank];
    const Plan& plan = engine.plan();
    if (plan.num_ranks() != std::ssize(engines) || plan.rank() != static_cast<int>(rank)) {
      throw Error(ErrorKind::kEngineIncompatible,
                  cat(engine.name(), ": is rank ", plan.rank(), " of ", plan.num_ranks(), ", expected rank ", rank,
                      " of ", engines.size(), "; the ranks of an engine run together, from files of one build"));
    }
    if (engine.build_id() != first.build_id() || !have_equal_sizes(plan, first.plan()) || !follows(plan, engines)) {
      throw Error(ErrorKind::kEngineIncompatible,
                  cat(engine.name(), ": is from another build than ", first.name(), "; build all ranks together"));
    }
  }
}

}  // namespace aotllm
