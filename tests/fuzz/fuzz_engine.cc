// Any file: refused with Error(kEngine or kEngineIncompatible), or an engine that runs a step within its memory.
//
// The input is an edit of a valid engine, so that most runs get past the header: its first two bytes are a position,
// the rest replaces the bytes there. A first byte of 255 takes the rest as the whole file.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "aotllm/errors.h"
#include "tiny_model.h"

namespace {

using namespace aotllm;

std::vector<std::uint8_t> edited_engine(std::span<const std::uint8_t> input) {
  static const std::vector<std::uint8_t> valid =
      testing_support::TinyModel({.vocab = 17, .layers = 1, .max_seq_len = 16, .max_num_tokens = 4, .bias = true})
          .engine_bytes();
  if (input.size() < 2) return valid;
  if (input[0] == 255) return {input.begin() + 1, input.end()};
  std::vector<std::uint8_t> bytes = valid;
  const std::size_t at = std::min<std::size_t>(input[0] * 256u + input[1], bytes.size());
  const auto edit = input.subspan(2, std::min(input.size() - 2, bytes.size() - at));
  std::copy(edit.begin(), edit.end(), bytes.begin() + static_cast<std::ptrdiff_t>(at));
  return bytes;
}

/// Engines of these sizes are run; larger ones would only take the fuzzer's time.
bool is_small(const ModelShape& shape) {
  std::int64_t kv_bytes = 0;
  for (const KvGroupShape& group : shape.kv_groups) kv_bytes += group.bytes_per_block;
  return shape.max_num_tokens <= 64 && shape.vocab_size <= 4096 && kv_bytes <= 1 << 20;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    Engine engine = Engine::from_bytes(edited_engine({data, size}), "fuzz");
    if (!is_small(engine.shape())) return 0;
    CpuRunner runner(std::move(engine), {1, nullptr});
    runner.allocate_kv({.device_blocks = {1, 1, 1, 1}});
    const TokenId tokens[] = {0};
    const BlockId blocks[] = {0};
    const SequenceStep sequence{tokens, 0, {blocks, blocks, blocks, blocks}, LogitsMode::kAll};
    StepOutputs outputs;
    runner.step({&sequence, 1}, outputs);
    if (outputs.rows() != 1) std::abort();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kEngine && error.kind() != ErrorKind::kEngineIncompatible) std::abort();
  }
  return 0;
}
