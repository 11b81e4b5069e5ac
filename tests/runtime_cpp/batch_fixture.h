#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "expected_output.h"
#include "fake_runner.h"
#include "manager/inflight_batcher.h"
#include "manager/limits.h"

namespace aotllm::testing {

inline const std::vector<TokenId> kEos = {2, 3};

/// What the test batch is made of.
struct BatchOptions {
  ModelShape shape = small_shape();
  std::vector<TokenId> eos_token_ids = kEos;
  FakeRunner::Hook hook{};
  DraftProposer* proposer = nullptr;
  Background* background = nullptr;
  Watchdog* watchdog = nullptr;
  std::function<std::unique_ptr<FakeRunner>(const ModelShape&, FakeRunner::Hook)> make_runner =
      [](const ModelShape& its_shape, FakeRunner::Hook its_hook) {
        return std::make_unique<FakeRunner>(its_shape, std::move(its_hook));
      };
};

/// The batch on another kind of runner.
template <class Runner>
BatchOptions options_with() {
  BatchOptions options;
  options.make_runner = [](const ModelShape& shape, FakeRunner::Hook hook) {
    return std::make_unique<Runner>(shape, std::move(hook));
  };
  return options;
}

/// The batch on a runner that samples, and can do what `support` says beside it.
template <class Runner = SamplingRunner>
BatchOptions sampling_options(const SamplingSupport& support = {}) {
  BatchOptions options;
  options.make_runner = [support](const ModelShape& shape, FakeRunner::Hook hook) {
    auto runner = std::make_unique<Runner>(shape, std::move(hook));
    runner->support = support;
    return runner;
  };
  return options;
}

/// A batcher on the fake runner that is stepped by hand; invariants are checked between all moves.
class Batch {
 public:
  using Key = std::pair<RequestId, std::int32_t>;  ///< request and sequence index

  explicit Batch(const ManagerConfig& config, const BatchOptions& options = {})
      : limits(resolve_limits(options.shape, with_eos(config, options.eos_token_ids), {})),
        runner(options.make_runner(options.shape, options.hook)),
        batcher(*runner, limits, {options.proposer, options.background, options.watchdog}) {
    KvAllocation allocation;
    for (std::size_t group = 0; group < limits.kv_memory.groups.size(); ++group) {
      allocation.device_blocks[group] = limits.kv_memory.groups[group].device_blocks;
      allocation.host_blocks[group] = limits.kv_memory.groups[group].host_blocks;
    }
    runner->allocate_kv(allocation);
  }

  RequestId add(const Request& request, Clock::time_point now = {}) {
    validate_request(request, limits);
    ++last_id_;
    for (std::int32_t i = 0; i < request.n; ++i) {
      add_sequence(std::make_unique<Sequence>(last_id_, i, request, /*random_seed=*/0, now, limits));
    }
    return last_id_;
  }

  void add_sequence(std::unique_ptr<Sequence> sequence) {
    sequence->id = ++last_sequence_;
    batcher.add(std::move(sequence));
    batcher.check_invariants();
  }

  void cancel(RequestId id, std::int32_t index = -1) {
    batcher.cancel(id, index);
    collect();
  }

  void step() {
    batcher.plan();
    batcher.check_invariants();
    batcher.run();
    collect();
  }

  void run_to_end() {
    for (int i = 0; !batcher.idle(); ++i) {
      ASSERT_LT(i, 100000) << "the batch does not end";
      step();
    }
  }

  /// Tokens and end of one request that is run from here to its end.
  std::vector<TokenId> answer(const Request& request) {
    const RequestId id = add(request);
    run_to_end();
    return tokens[id];
  }

  bool ended(RequestId id, std::int32_t index = 0) const {
    const auto found = last_of.find({id, index});
    return found != last_of.end() && found->second.finish_reason.has_value();
  }

  void collect() {
    batcher.check_invariants();
    for (Response& response : batcher.take_responses()) {
      const Key key{response.request_id, response.sequence_index};
      EXPECT_FALSE(ended(key.first, key.second)) << "news of request " << key.first << " after its last";
      std::vector<TokenId>& all = tokens_of[key];
      all.insert(all.end(), response.token_ids.begin(), response.token_ids.end());
      std::vector<TokenLogprobs>& logprobs = logprobs_of[key];
      logprobs.insert(logprobs.end(), response.logprobs.begin(), response.logprobs.end());
      if (!response.prompt_logprobs.empty()) {
        prompt_logprobs[key.first] = response.prompt_logprobs;
      }
      if (key.second == 0) {
        tokens[key.first] = all;
        last[key.first] = response;
      }
      last_of[key] = std::move(response);
    }
  }

  const Limits limits;
  const std::unique_ptr<FakeRunner> runner;
  InflightBatcher batcher;
  std::map<RequestId, std::vector<TokenId>> tokens;  ///< of the first sequence of each request
  std::map<RequestId, Response> last;                ///< likewise
  std::map<RequestId, std::vector<TokenLogprobs>> prompt_logprobs;
  std::map<Key, std::vector<TokenId>> tokens_of;
  std::map<Key, Response> last_of;
  std::map<Key, std::vector<TokenLogprobs>> logprobs_of;

 private:
  static ManagerConfig with_eos(ManagerConfig config, const std::vector<TokenId>& eos_token_ids) {
    config.eos_token_ids = eos_token_ids;
    return config;
  }

  RequestId last_id_ = 0;
  SequenceId last_sequence_ = 0;
};

inline Request greedy_request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request;
  request.prompt_token_ids = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.temperature = 0.0;
  request.sampling.ignore_eos = true;
  return request;
}

/// Proposes what the fake model will say, with a random error now and then.
class MockProposer final : public DraftProposer {
 public:
  /// Every `wrong_every`-th draft is wrong; 1 = all.
  MockProposer(const ModelShape& shape, std::uint64_t wrong_every) : shape_(shape), wrong_every_(wrong_every) {}

  void propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) override {
    drafts.assign(queries.size(), {});
    for (std::size_t i = 0; i < queries.size(); ++i) {
      Request request = greedy_request({queries[i].tokens.begin(), queries[i].tokens.end()}, queries[i].max_drafts);
      drafts[i] = expected_output(request, shape_, shape_.max_seq_len, {}).tokens;
      for (TokenId& token : drafts[i]) {
        if (++count_ % wrong_every_ == 0) {
          token = (token + 1) % shape_.vocab_size;
        }
      }
    }
  }

  void forget(SequenceId /*id*/) override {}

 private:
  ModelShape shape_;
  std::uint64_t wrong_every_;
  std::uint64_t count_ = 0;
};

}  // namespace aotllm::testing
