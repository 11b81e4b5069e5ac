#include "manager/limits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "fake_runner.h"
#include "support/free_memory.h"

namespace aotllm {
namespace {

using testing::small_shape;  // 48 tokens = 12 blocks of 64 bytes a sequence; 8 sequences of them are 96 blocks

TEST(Limits, TakeTheEnginesWhereTheConfigSaysZero) {
  const Limits limits = resolve_limits(small_shape(), {}, {});
  EXPECT_EQ(limits.scheduler.max_batch_size, 8);
  EXPECT_EQ(limits.scheduler.max_num_tokens, 32);
  EXPECT_EQ(limits.scheduler.max_chunk_tokens, 32);
  EXPECT_EQ(limits.scheduler.tokens_per_block, 4);
  EXPECT_EQ(limits.max_seq_len, 48);
}

TEST(Limits, EndTokensThatTheVocabularyDoesNotHaveDoNotCount) {
  ManagerConfig config;
  config.eos_token_ids = {-1, 36, 37, 2};
  const Limits limits = resolve_limits(small_shape(), config, {});
  EXPECT_EQ(limits.eos_token_ids, (std::vector<TokenId>{36, 2}));
}

TEST(Limits, SizeTheKvCacheByTheFreeMemory) {
  struct Case {
    std::optional<std::int64_t> free_bytes;
    std::int32_t blocks;
    std::int32_t max_seq_len;
  };
  const std::vector<Case> cases = {
      {1 << 30, 96, 48},       // all that can be used
      {4 * 64 * 50, 50, 48},   // a quarter of the memory
      {4 * 64 * 12, 12, 48},   // a quarter holds just one sequence
      {64 * 24, 12, 48},       // more than a quarter, for the sake of one
      {64 * 12, 9, 36},        // three quarters do not hold one
      {64 * 2, 1, 4},          // as little as can be
      {std::nullopt, 12, 48},  // unknown
  };
  for (const Case& c : cases) {
    const Limits limits = resolve_limits(small_shape(), {}, FreeMemory::of_host(c.free_bytes));
    EXPECT_EQ(limits.kv_memory.groups[0].device_blocks, c.blocks) << c.free_bytes.value_or(-1);
    EXPECT_EQ(limits.max_seq_len, c.max_seq_len) << c.free_bytes.value_or(-1);
  }
  EXPECT_THROW(resolve_limits(small_shape(), {}, FreeMemory::of_host(64)), Error);
}

TEST(Limits, FewerBlocksShortenTheContext) {
  ManagerConfig config;
  config.num_kv_blocks = 3;
  EXPECT_EQ(resolve_limits(small_shape(), config, {}).max_seq_len, 12);
  config.num_kv_blocks = 1000;
  EXPECT_EQ(resolve_limits(small_shape(), config, {}).max_seq_len, 48);
}

TEST(Limits, NameTheFieldThatIsOutOfRange) {
  struct Case {
    const char* param;
    void (*set)(ManagerConfig&);
  };
  const std::vector<Case> cases = {
      {"max_batch_size", [](ManagerConfig& c) { c.max_batch_size = 9; }},
      {"max_batch_size", [](ManagerConfig& c) { c.max_batch_size = -1; }},
      {"max_num_tokens", [](ManagerConfig& c) { c.max_num_tokens = 33; }},
      {"max_chunk_tokens", [](ManagerConfig& c) { c.max_chunk_tokens = -1; }},
      {"max_queue_size", [](ManagerConfig& c) { c.max_queue_size = -1; }},
      {"num_kv_blocks", [](ManagerConfig& c) { c.num_kv_blocks = -1; }},
  };
  for (const Case& c : cases) {
    ManagerConfig config;
    c.set(config);
    try {
      resolve_limits(small_shape(), config, {});
      ADD_FAILURE() << c.param;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
      EXPECT_EQ(e.param(), c.param);
    }
  }
}

TEST(Limits, MoreMemoryThanIsFreeIsRefusedByTheFieldThatAsksForIt) {
  struct Case {
    const char* param;
    void (*set)(ManagerConfig&, std::int64_t);
    std::int64_t most;  ///< of 100 blocks of 64 bytes
  };
  const std::vector<Case> cases = {
      {"num_kv_blocks", [](ManagerConfig& c, std::int64_t v) { c.num_kv_blocks = static_cast<std::int32_t>(v); }, 100},
      {"kv_cache_tokens", [](ManagerConfig& c, std::int64_t v) { c.kv_cache_tokens = v; }, 400},
      {"kv_cache_bytes", [](ManagerConfig& c, std::int64_t v) { c.kv_cache_bytes = v; }, 6463},
      {"kv_host_bytes",
       [](ManagerConfig& c, std::int64_t v) {
         c.num_kv_blocks = 12;
         c.kv_host_bytes = v;
       },
       5695},
  };
  for (const Case& c : cases) {
    ManagerConfig config;
    c.set(config, c.most);
    EXPECT_NO_THROW(resolve_limits(small_shape(), config, FreeMemory::of_host(6400))) << c.param;
    for (const std::int64_t above : {c.most + 1, std::int64_t{1} << 30, std::int64_t{1} << 60}) {
      c.set(config, std::min<std::int64_t>(above, c.param == cases[0].param ? INT32_MAX : INT64_MAX));
      try {
        resolve_limits(small_shape(), config, FreeMemory::of_host(6400));
        ADD_FAILURE() << c.param << " of " << above;
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
        EXPECT_EQ(e.param(), c.param) << e.what();
      }
    }
  }
}

TEST(Limits, ARequestOfMoreSequencesThanCanEverWaitAndRunIsRefused) {
  ManagerConfig config;
  config.max_queue_size = 3;
  config.max_batch_size = 2;
  const Limits limits = resolve_limits(small_shape(), config, {});
  Request request;
  request.prompt_token_ids = {0};
  request.n = 5;
  EXPECT_NO_THROW(validate_request(request, limits));
  request.n = 6;
  try {
    validate_request(request, limits);
    ADD_FAILURE() << "6 sequences";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
    EXPECT_EQ(e.param(), "n");
  }
}

TEST(Limits, RequestsAreCheckedFieldByField) {
  struct Case {
    const char* param;
    ErrorKind kind;
    void (*set)(Request&);
    const char* text;
  };
  const std::vector<Case> cases = {
      {"prompt_token_ids", ErrorKind::kInvalidRequest, [](Request& r) { r.prompt_token_ids = {}; }, "empty"},
      {"prompt_token_ids", ErrorKind::kInvalidRequest, [](Request& r) { r.prompt_token_ids = {0, 37}; }, "holds 37"},
      {"prompt_token_ids", ErrorKind::kInvalidRequest, [](Request& r) { r.prompt_token_ids = {-1}; }, "[0, 37)"},
      {"top_p", ErrorKind::kInvalidRequest, [](Request& r) { r.sampling.top_p = 2; }, "(0, 1]"},
      {"logprobs", ErrorKind::kInvalidRequest, [](Request& r) { r.logprobs = -2; }, "-1 for none"},
      {"logprobs", ErrorKind::kInvalidRequest, [](Request& r) { r.logprobs = 38; }, "[0, 37]"},
      {"prompt_token_ids", ErrorKind::kContextTooLong, [](Request& r) { r.prompt_token_ids.assign(48, 0); },
       "maximum context length is 48 tokens"},
  };
  const Limits limits = resolve_limits(small_shape(), {}, {});
  for (const Case& c : cases) {
    Request request;
    request.prompt_token_ids = {0};
    c.set(request);
    try {
      validate_request(request, limits);
      ADD_FAILURE() << c.text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), c.kind) << e.what();
      EXPECT_EQ(e.param(), c.param);
      EXPECT_NE(std::string(e.what()).find(c.text), std::string::npos) << e.what();
    }
  }
  Request longest;
  longest.prompt_token_ids.assign(47, 36);
  longest.logprobs = 37;
  EXPECT_NO_THROW(validate_request(longest, limits));
}

TEST(FreeMemory, ReadsFieldsOfTheKernelsTables) {
  const auto read = [](const char* key) {
    std::istringstream text("MemTotal:  9 kB\nMemAvailable:   123456 kB\nbroken: x\ninactive_file 7\n");
    return read_field(text, key);
  };
  EXPECT_EQ(read("MemAvailable:"), 123456);
  EXPECT_EQ(read("inactive_file"), 7);
  EXPECT_EQ(read("broken:"), std::nullopt);
  EXPECT_EQ(read("MemFree:"), std::nullopt);
}

TEST(FreeMemory, IsSomeOnLinux) {
  EXPECT_GT(free_memory().value_or(0), 0);
}

}  // namespace
}  // namespace aotllm
