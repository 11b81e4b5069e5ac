#include "runner/oracle_runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>
#include <utility>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// Of the token that is said. At temperature 2 the others, at 0, are e^-50 as likely, which no draw can hit.
constexpr float kSpokenLogit = 100.0F;

void require(bool holds, const char* param, std::int64_t got, const char* allowed) {
  if (!holds) throw Error(ErrorKind::kInvalidRequest, cat(param, " is ", got, "; it must be ", allowed), param);
}

OracleOptions checked(OracleOptions options) {
  const ModelShape& shape = options.shape;
  require(shape.vocab_size >= 1, "vocab_size", shape.vocab_size, "at least 1");
  require(shape.hidden_size >= 0, "hidden_size", shape.hidden_size, "at least 0");
  require(shape.max_seq_len >= 2, "max_seq_len", shape.max_seq_len, "at least 2");
  require(shape.max_batch_size >= 1, "max_batch_size", shape.max_batch_size, "at least 1");
  require(shape.max_num_tokens >= shape.max_batch_size, "max_num_tokens", shape.max_num_tokens,
          "at least max_batch_size");
  require(shape.tokens_per_block >= 1, "tokens_per_block", shape.tokens_per_block, "at least 1");
  const auto num_groups = std::ssize(shape.kv_groups);
  require(num_groups >= 1 && num_groups <= kMaxKvGroups, "kv_windows", num_groups, "1 to 4 windows");
  for (std::size_t i = 0; i < shape.kv_groups.size(); ++i) {
    const std::int32_t window = shape.kv_groups[i].window;
    const bool ordered =
        i == 0 || (window > 0 && (shape.kv_groups[i - 1].window == 0 || shape.kv_groups[i - 1].window > window));
    require(window >= 0 && ordered, "kv_windows", window, "0 (all tokens) or, after it, windows in falling order");
    require(shape.kv_groups[i].bytes_per_block >= 0, "kv_bytes_per_token", shape.kv_groups[i].bytes_per_block,
            "at least 0");
  }
  for (const TokenId token : options.spoken_tokens) {
    require(token >= 0 && token < shape.vocab_size, "spoken_tokens", token, "in [0, vocab_size)");
  }
  if (!(options.step_seconds >= 0.0 && std::isfinite(options.step_seconds))) {
    throw Error(ErrorKind::kInvalidRequest, cat("step_seconds is ", options.step_seconds, "; it must be at least 0"),
                "step_seconds");
  }
  if (options.spoken_tokens.empty()) {
    options.spoken_tokens.resize(static_cast<std::size_t>(shape.vocab_size));
    std::iota(options.spoken_tokens.begin(), options.spoken_tokens.end(), 0);
  }
  return options;
}

std::uint64_t mix(TokenId token, std::int32_t position, AdapterId adapter) {
  const auto at = static_cast<std::uint64_t>(token) << 32 | static_cast<std::uint32_t>(position);
  return at * 0x9E3779B97F4A7C15 + static_cast<std::uint64_t>(adapter) * 0xD1B54A32D192ED03;
}

}  // namespace

OracleRunner::OracleRunner(OracleOptions options) : options_(checked(std::move(options))), batch_(options_.shape) {}

TokenId OracleRunner::next_token(TokenId token, std::int32_t position, AdapterId adapter) const {
  const std::uint64_t x = mix(token, position, adapter);
  return options_.spoken_tokens[(x ^ (x >> 32)) % options_.spoken_tokens.size()];
}

float OracleRunner::hidden_value(TokenId token, std::int32_t position, AdapterId adapter, std::int32_t index) {
  return static_cast<float>(mix(token + index, position, adapter) >> 40) * 0x1.0p-23F - 1.0F;
}

void OracleRunner::allocate_kv(const KvAllocation& allocation) {
  kv_ = allocation;
}

void OracleRunner::step(std::span<const SequenceStep> sequences, StepOutputs& outputs) {
  const auto begun = std::chrono::steady_clock::now();
  batch_.assign(sequences, kv_.device_blocks);
  outputs.vocab_size = options_.shape.vocab_size;
  outputs.logits.assign(batch_.logit_rows().size() * static_cast<std::size_t>(outputs.vocab_size), 0.0F);
  std::int32_t row = 0;
  for (const std::int32_t token_row : batch_.logit_rows()) {
    const TokenId next = next_token(batch_.token(token_row), batch_.position(token_row), batch_.adapter(token_row));
    outputs.row(row++)[static_cast<std::size_t>(next)] = kSpokenLogit;
  }
  outputs.hidden_size = options_.shape.hidden_size;
  outputs.hidden.clear();
  for (const std::int32_t token_row : batch_.hidden_rows()) {
    for (std::int32_t i = 0; i < outputs.hidden_size; ++i) {
      outputs.hidden.push_back(
          hidden_value(batch_.token(token_row), batch_.position(token_row), batch_.adapter(token_row), i));
    }
  }
  if (options_.step_seconds > 0.0) {
    std::this_thread::sleep_until(begun + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                              std::chrono::duration<double>(options_.step_seconds)));
  }
}

void OracleRunner::copy_blocks(std::span<const BlockCopy> copies) {
  for (const BlockCopy& copy : copies) {
    const auto check = [&](KvTier tier, BlockId block) {
      const BlockCounts& counts = tier == KvTier::kDevice ? kv_.device_blocks : kv_.host_blocks;
      if (copy.group < 0 || copy.group >= kMaxKvGroups || block < 0 ||
          block >= counts[static_cast<std::size_t>(copy.group)]) {
        throw Error(ErrorKind::kInternal, cat("copy_blocks: group ", copy.group, " has no block ", block));
      }
    };
    check(copy.from_tier, copy.from);
    check(copy.to_tier, copy.to);
  }
}

void OracleRunner::load_adapter(AdapterId id, const Adapter& /*adapter*/) {
  if (id < 1 || !adapters_.insert(id).second) {
    throw Error(ErrorKind::kInternal, cat("load_adapter: id ", id, " is taken or below 1"));
  }
}

void OracleRunner::unload_adapter(AdapterId id) {
  if (adapters_.erase(id) == 0) throw Error(ErrorKind::kInternal, cat("unload_adapter: id ", id, " is not loaded"));
}

}  // namespace aotllm
