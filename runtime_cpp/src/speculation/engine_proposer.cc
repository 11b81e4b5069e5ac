#include <algorithm>
#include <unordered_map>
#include <utility>

#include "aotllm/draft_proposer.h"
#include "aotllm/errors.h"
#include "aotllm/kv_cache.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Blocks of each group of the draft engine. Windows are not made use of: rejected drafts move sequences back, perhaps
/// behind what would have left the window by then.
KvCacheConfig cache_config(const ModelShape& shape, std::int32_t num_blocks) {
  KvCacheConfig config;
  config.tokens_per_block = shape.tokens_per_block;
  for (std::size_t group = 0; group < shape.kv_groups.size(); ++group) {
    config.groups.push_back({0, num_blocks, 0});
  }
  return config;
}

class EngineProposer final : public DraftProposer {
 public:
  EngineProposer(std::unique_ptr<ModelRunner> runner, std::int32_t num_blocks)
      : runner_(std::move(runner)), shape_(runner_->shape()), kv_(cache_config(shape_, num_blocks)) {
    KvAllocation allocation;
    std::fill_n(allocation.device_blocks.begin(), shape_.kv_groups.size(), num_blocks);
    runner_->allocate_kv(allocation);
  }

  void propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) override;
  void forget(SequenceId id) override;

 private:
  struct State {
    PrefixKeys keys;
    BlockTable table;
    std::vector<TokenId> computed;  ///< tokens whose K and V the table holds
  };

  /// A query in work: the tokens of the sequence with its drafts so far.
  struct Job {
    State* state = nullptr;
    std::vector<TokenId> tokens;
    std::int32_t missing = 0;  ///< drafts yet to be made
    std::size_t query = 0;
  };

  State& state_of(const Query& query);
  bool make_room(State& state, std::int32_t num_tokens);
  void run(std::vector<Job>& jobs, std::vector<std::vector<TokenId>>& drafts);

  std::unique_ptr<ModelRunner> runner_;
  const ModelShape shape_;
  KvCache kv_;
  std::unordered_map<SequenceId, State> states_;
  StepOutputs outputs_;
};

/// The state of a sequence, gone back to the tokens that the sequence really has.
EngineProposer::State& EngineProposer::state_of(const Query& query) {
  const PrefixRealm realm = query.realm == nullptr ? PrefixRealm{} : *query.realm;
  const auto [found, is_new] = states_.try_emplace(query.id, State{PrefixKeys(realm, shape_.tokens_per_block), {}, {}});
  State& state = found->second;
  if (is_new) {
    state.keys.extend(query.tokens);
    const std::int32_t cached = kv_.acquire(state.table, state.keys, query.tokens);
    state.computed.assign(query.tokens.begin(), query.tokens.begin() + cached);
  }
  const std::size_t most =
      std::min(state.computed.size(), query.tokens.size() - 1);  // the last one's logits are needed
  const auto differs = std::mismatch(state.computed.begin(), state.computed.begin() + static_cast<std::ptrdiff_t>(most),
                                     query.tokens.begin());
  state.computed.erase(differs.first, state.computed.end());
  return state;
}

/// Makes the table cover `num_tokens` positions. False where the memory does not have them.
bool EngineProposer::make_room(State& state, std::int32_t num_tokens) {
  const std::int32_t needed = blocks_in_step(0, num_tokens, 0, shape_.tokens_per_block).size();
  for (int group = 0; group < kv_.num_groups(); ++group) {
    if (needed - state.table.num_blocks()[static_cast<std::size_t>(group)] > kv_.num_free(group)) {
      return false;
    }
  }
  kv_.grow(state.table, static_cast<std::int32_t>(state.computed.size()), num_tokens);
  return true;
}

void EngineProposer::propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) {
  drafts.assign(queries.size(), {});
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const Query& query = queries[i];
    // The last draft is not computed, but made from its predecessor's logits.
    const auto room = shape_.max_seq_len - static_cast<std::int32_t>(query.tokens.size());
    const std::int32_t count = std::min(query.max_drafts, room);
    if (count < 1) {
      continue;
    }
    State& state = state_of(query);
    if (!make_room(state, static_cast<std::int32_t>(query.tokens.size()) + count - 1)) {
      forget(query.id);  // its blocks may help another one
      continue;
    }
    jobs.push_back({&state, {query.tokens.begin(), query.tokens.end()}, count, i});
  }
  run(jobs, drafts);
}

/// Steps until every job has its drafts. All jobs share each step, within the engine's limits.
void EngineProposer::run(std::vector<Job>& jobs, std::vector<std::vector<TokenId>>& drafts) {
  std::vector<SequenceStep> steps;
  std::vector<Job*> running;
  while (true) {
    steps.clear();
    running.clear();
    std::int32_t budget = shape_.max_num_tokens;
    for (Job& job : jobs) {
      if (job.missing == 0 || budget == 0 || running.size() == static_cast<std::size_t>(shape_.max_batch_size)) {
        continue;
      }
      const std::size_t start = job.state->computed.size();
      const auto count = std::min(job.tokens.size() - start, static_cast<std::size_t>(budget));
      SequenceStep step;
      step.tokens = std::span<const TokenId>(job.tokens).subspan(start, count);
      step.start_position = static_cast<std::int32_t>(start);
      for (int group = 0; group < kv_.num_groups(); ++group) {
        step.block_tables[static_cast<std::size_t>(group)] = job.state->table.blocks(group);
      }
      step.logits = start + count == job.tokens.size() ? LogitsMode::kLast : LogitsMode::kNone;
      budget -= static_cast<std::int32_t>(count);
      steps.push_back(step);
      running.push_back(&job);
    }
    if (steps.empty()) {
      return;
    }
    const std::vector<BlockCopy> copies = kv_.take_copies();
    if (!copies.empty()) {
      runner_->copy_blocks(copies);
    }
    runner_->step(steps, outputs_);
    std::int32_t row = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      Job& job = *running[i];
      const std::size_t start = job.state->computed.size();
      job.state->computed.insert(job.state->computed.end(), job.tokens.begin() + static_cast<std::ptrdiff_t>(start),
                                 job.tokens.begin() + static_cast<std::ptrdiff_t>(start + steps[i].tokens.size()));
      if (steps[i].logits == LogitsMode::kLast) {
        const std::span<const float> logits = outputs_.row(row++);
        const auto token = static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
        job.tokens.push_back(token);
        drafts[job.query].push_back(token);
        --job.missing;
      }
    }
  }
}

void EngineProposer::forget(SequenceId id) {
  const auto found = states_.find(id);
  if (found == states_.end()) {
    return;
  }
  State& state = found->second;
  state.keys.extend(state.computed);
  kv_.release(state.table, state.keys, state.computed);
  states_.erase(found);
}

}  // namespace

std::unique_ptr<DraftProposer> make_engine_proposer(std::unique_ptr<ModelRunner> runner, std::int32_t num_blocks) {
  if (num_blocks < 1) {
    throw Error(ErrorKind::kInvalidRequest, cat("a draft engine with ", num_blocks, " KV blocks; at least 1 is needed"),
                "num_blocks");
  }
  return std::make_unique<EngineProposer>(std::move(runner), num_blocks);
}

}  // namespace aotllm
