// What only the manager with its threads can show: storms of cancellations, adapters, deadlines, limits, news.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/gpt_manager.h"
#include "batch_fixture.h"
#include "error_kind_of.h"

namespace aotllm {
namespace {

using namespace std::chrono_literals;
using testing::error_kind_of;
using testing::expected_output;
using testing::FakeRunner;
using testing::greedy_request;
using testing::MockProposer;
using testing::small_shape;
using testing::windowed_shape;

using Key = std::pair<RequestId, std::int32_t>;

/// What came of each sequence.
struct Answers {
  std::map<Key, std::vector<TokenId>> tokens;
  std::map<Key, Response> last;

  void add(std::vector<Response> responses) {
    for (Response& response : responses) {
      const Key key{response.request_id, response.sequence_index};
      EXPECT_FALSE(last.contains(key)) << "news after the last";
      tokens[key].insert(tokens[key].end(), response.token_ids.begin(), response.token_ids.end());
      if (response.finish_reason) {
        last[key] = std::move(response);
      }
    }
  }

  void poll_until(GptManager& manager, std::size_t num_ended) {
    while (last.size() < num_ended) {
      std::vector<Response> responses = manager.poll(20s);
      ASSERT_FALSE(responses.empty()) << "only " << last.size() << " of " << num_ended << " sequences ended";
      add(std::move(responses));
    }
  }
};

std::unique_ptr<GptManager> manager(const ManagerConfig& config, const ModelShape& shape = small_shape(),
                                    std::unique_ptr<DraftProposer> proposer = nullptr, FakeRunner::Hook hook = {}) {
  return std::make_unique<GptManager>(std::make_unique<FakeRunner>(shape, std::move(hook)), config,
                                      std::move(proposer));
}

/// Requests that share prefixes come from one thread while another cancels half of them, in whatever state they are.
/// Those that are left say what they would say alone, and nothing of the others stays behind.
void storms(GptManager& manager, const ModelShape& shape, int count) {
  std::mt19937 random(7);
  for (int storm = 0; storm < count; ++storm) {
    std::map<RequestId, Request> requests;
    std::vector<RequestId> ids;
    for (int i = 0; i < 12; ++i) {
      std::vector<TokenId> prompt(1 + random() % 25, 4 + static_cast<TokenId>(random() % 2));
      Request asked = greedy_request(std::move(prompt), 1 + static_cast<std::int32_t>(random() % 20));
      asked.n = 1 + static_cast<std::int32_t>(random() % 2);
      ids.push_back(manager.submit(asked));
      requests[ids.back()] = asked;
    }
    std::thread canceller([&] {
      for (std::size_t i = 0; i < ids.size(); i += 2) {
        manager.cancel(ids[i]);
      }
    });
    Answers answers;
    std::size_t sequences = 0;
    for (const auto& [id, asked] : requests) {
      sequences += static_cast<std::size_t>(asked.n);
    }
    answers.poll_until(manager, sequences);
    canceller.join();
    for (const auto& [key, last] : answers.last) {
      const Request& asked = requests[key.first];
      const std::vector<TokenId> expected =
          expected_output(asked, shape, manager.max_seq_len(), {}, static_cast<std::uint32_t>(key.second)).tokens;
      const std::vector<TokenId>& got = answers.tokens[key];
      if (last.finish_reason == FinishReason::kCancelled) {
        ASSERT_LE(got.size(), expected.size());
        ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
      } else {
        ASSERT_EQ(got, expected) << last.error_message;
      }
    }
    const Stats stats = manager.stats();
    ASSERT_EQ(stats.running + stats.queued + stats.blocks_used, 0);
  }
}

ManagerConfig stormy_config() {
  ManagerConfig config;
  config.num_kv_blocks = 16;
  config.max_chunk_tokens = 5;
  config.kv_host_bytes = 10 * 64;
  config.max_queue_size = 1000;
  return config;
}

TEST(GptManagerStorm, AHundredStormsOfCancellationsTouchNobodyElse) {
  for (const ModelShape& shape : {small_shape(), windowed_shape()}) {
    ManagerConfig config = stormy_config();
    config.num_speculative_tokens = 2;
    storms(*manager(config, shape, std::make_unique<MockProposer>(shape, 3)), shape, 50);
  }
}

TEST(GptManagerStorm, NorWhereStepsAreQueued) {
  for (const ModelShape& shape : {small_shape(), windowed_shape()}) {
    GptManager queueing(std::make_unique<testing::QueueingRunner>(shape), stormy_config());
    storms(queueing, shape, 50);
    EXPECT_GT(queueing.stats().steps_queued, 100);
  }
}

TEST(GptManagerFeatures, CancellingOneSequenceLeavesItsSiblings) {
  ManagerConfig config;
  config.num_kv_blocks = 60;
  std::atomic<bool> open = false;
  const auto mgr = manager(config, small_shape(), nullptr, [&](std::int64_t step) {
    while (step == 3 && !open) {
      std::this_thread::yield();
    }
  });
  Request asked = greedy_request({4, 5, 6}, 30);
  asked.n = 3;
  asked.sampling.temperature = 1.0;
  asked.sampling.seed = 5;
  const RequestId id = mgr->submit(asked);
  mgr->cancel(id, 1);
  mgr->cancel(id, 7);  // there is none
  open = true;
  Answers answers;
  answers.poll_until(*mgr, 3);
  EXPECT_EQ((answers.last[{id, 1}].finish_reason), FinishReason::kCancelled);
  for (const std::int32_t index : {0, 2}) {
    EXPECT_EQ((answers.tokens[{id, index}]), expected_output(asked, small_shape(), 48, {}, index).tokens);
  }
}

TEST(GptManagerFeatures, TimeoutsEndRequestsWithWhatTheyHave) {
  ManagerConfig config;
  const auto mgr = manager(config);
  Request hasty = greedy_request({4, 5}, 40);
  hasty.timeout = 1e-9;
  const Request patient = greedy_request({6, 7}, 20);
  const RequestId first = mgr->submit(hasty);
  const RequestId second = mgr->submit(patient);
  Answers answers;
  answers.poll_until(*mgr, 2);
  EXPECT_EQ((answers.last[{first, 0}].finish_reason), FinishReason::kTimeout);
  EXPECT_EQ((answers.tokens[{second, 0}]), expected_output(patient, small_shape(), 48, {}).tokens);
  EXPECT_EQ(mgr->stats().timed_out, 1);
  EXPECT_GT((answers.last[{second, 0}].timings.total_seconds), 0.0);
  EXPECT_LE((answers.last[{second, 0}].timings.queue_seconds), (answers.last[{second, 0}].timings.first_token_seconds));
}

TEST(GptManagerFeatures, QueuedTokensAreBounded) {
  ManagerConfig config;
  config.max_batch_size = 1;
  config.max_queued_tokens = 20;
  std::atomic<bool> open = false;
  const auto mgr = manager(config, small_shape(), nullptr, [&](std::int64_t) {
    while (!open) {
      std::this_thread::yield();
    }
  });
  const Request asked = greedy_request(std::vector<TokenId>(8, 4), 2);
  mgr->submit(asked);
  while (mgr->stats().running == 0) {
    std::this_thread::yield();
  }
  mgr->submit(asked);
  mgr->submit(asked);
  EXPECT_EQ(error_kind_of([&] { mgr->submit(asked); }), ErrorKind::kOverloaded) << "16 wait, 8 more would be 24";
  EXPECT_NO_THROW(mgr->submit(greedy_request({4, 5}, 2)));
  open = true;
  Answers answers;
  answers.poll_until(*mgr, 4);
}

TEST(GptManagerFeatures, ARequestOfSeveralIsTakenWholeOrNotAtAll) {
  ManagerConfig config;
  config.max_batch_size = 2;
  config.max_queue_size = 1;
  std::atomic<bool> open = false;
  const auto mgr = manager(config, small_shape(), nullptr, [&](std::int64_t) {
    while (!open) {
      std::this_thread::yield();
    }
  });
  Request asked = greedy_request({4, 5}, 2);
  asked.n = 4;
  EXPECT_EQ(error_kind_of([&] { mgr->submit(asked); }), ErrorKind::kInvalidRequest) << "it could never fit";
  asked.n = 2;
  mgr->submit(asked);
  EXPECT_EQ(error_kind_of([&] { mgr->submit(asked); }), ErrorKind::kOverloaded) << "one of them would fit";
  asked.n = 1;
  mgr->submit(asked);
  open = true;
  Answers answers;
  answers.poll_until(*mgr, 3);
  EXPECT_EQ(mgr->stats().finished, 3);
}

/// Tells which adapters are loaded; else as the fake runner.
class AdapterRunner final : public FakeRunner {
 public:
  explicit AdapterRunner(std::shared_ptr<std::set<AdapterId>> loaded)
      : FakeRunner(small_shape()), loaded_(std::move(loaded)) {}

  void load_adapter(AdapterId id, const Adapter&) override {
    if (id == 13) {
      throw Error(ErrorKind::kInvalidRequest, "does not fit", "adapter");
    }
    loaded_->insert(id);
  }
  void unload_adapter(AdapterId id) override { loaded_->erase(id); }
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    for (const SequenceStep& sequence : sequences) {
      if (sequence.adapter != 0 && !loaded_->contains(sequence.adapter)) {
        throw Error(ErrorKind::kInternal, "an adapter that is not loaded");
      }
    }
    FakeRunner::step(sequences, outputs);
  }

 private:
  std::shared_ptr<std::set<AdapterId>> loaded_;
};

TEST(GptManagerFeatures, AdaptersComeAndGoWhileRequestsRun) {
  const auto loaded = std::make_shared<std::set<AdapterId>>();
  ManagerConfig config;
  config.num_kv_blocks = 60;
  GptManager mgr(std::make_unique<AdapterRunner>(loaded), config);
  Request asked = greedy_request({4, 5, 6, 7, 8}, 30);
  asked.adapter = 1;
  EXPECT_EQ(error_kind_of([&] { mgr.submit(asked); }), ErrorKind::kInvalidRequest);
  EXPECT_EQ(error_kind_of([&] { mgr.load_adapter(13, {}); }), ErrorKind::kInvalidRequest);
  mgr.load_adapter(1, {});
  mgr.load_adapter(2, {});
  const RequestId with_1 = mgr.submit(asked);
  mgr.unload_adapter(1);  // it stays until the request has ended
  mgr.unload_adapter(99);
  EXPECT_EQ(error_kind_of([&] { mgr.submit(asked); }), ErrorKind::kInvalidRequest);
  Request other = asked;
  other.adapter = 2;
  const RequestId with_2 = mgr.submit(other);
  Answers answers;
  answers.poll_until(mgr, 2);
  EXPECT_EQ((answers.tokens[{with_1, 0}]), expected_output(asked, small_shape(), 48, {}).tokens);
  EXPECT_EQ((answers.tokens[{with_2, 0}]), expected_output(other, small_shape(), 48, {}).tokens);
  EXPECT_NE((answers.tokens[{with_1, 0}]), (answers.tokens[{with_2, 0}]));
  mgr.shutdown();
  EXPECT_EQ(*loaded, (std::set<AdapterId>{2}));
  EXPECT_EQ(error_kind_of([&] { mgr.load_adapter(3, {}); }), ErrorKind::kCancelled);
}

TEST(GptManagerFeatures, NewsOfStepsAndOfTheCacheAreBounded) {
  ManagerConfig config;
  config.num_kv_blocks = 60;
  config.max_kv_events = 3;
  const auto mgr = manager(config);
  for (TokenId first = 4; first < 9; ++first) {
    mgr->submit(greedy_request(std::vector<TokenId>(9, first), 5));
  }
  Answers answers;
  answers.poll_until(*mgr, 5);
  EXPECT_EQ(mgr->step_stats().size(), static_cast<std::size_t>(mgr->stats().steps));
  EXPECT_TRUE(mgr->step_stats().empty());
  EXPECT_EQ(mgr->kv_events().size(), 3U);
  EXPECT_GT(mgr->stats().blocks_cached, 0);
  mgr->clear_prefix_cache();
  Answers after;
  const RequestId id = mgr->submit(greedy_request(std::vector<TokenId>(9, 4), 1));
  after.poll_until(*mgr, 1);
  EXPECT_EQ((after.last[{id, 0}].num_cached_tokens), 0);
  EXPECT_EQ(mgr->memory().groups.at(0).device_blocks, 60);
  EXPECT_EQ(mgr->memory().sequences_at_max_len, 5);
  EXPECT_EQ(mgr->memory().device_bytes, 60 * 64);
}

}  // namespace
}  // namespace aotllm
