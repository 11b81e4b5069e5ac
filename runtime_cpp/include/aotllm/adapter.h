#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace aotllm {

struct Plan;

/// Largest rank of an update.
inline constexpr std::int32_t kMaxAdapterRank = 256;

/// The linears of a layer that an adapter can update.
enum class AdapterModule : std::uint8_t { kQ, kK, kV, kO, kGate, kUp, kDown };
inline constexpr int kNumAdapterModules = 7;

/// "q", "k", "v", "o", "gate", "up" or "down".
const char* adapter_module_name(AdapterModule module) noexcept;
/// Returns false for an unknown name.
bool parse_adapter_module(std::string_view name, AdapterModule& module) noexcept;

/// y += B · (A · x) beside y = W · x, where x and y are float32: LoRA (arXiv 2106.09685).
struct LowRankUpdate {
  std::int32_t layer = 0;
  AdapterModule module = AdapterModule::kQ;
  std::int32_t rank = 0;  ///< 1 to kMaxAdapterRank
  std::int32_t in = 0;
  std::int32_t out = 0;
  std::vector<float> a;  ///< [rank, in]
  std::vector<float> b;  ///< [out, rank], the adapter's scale multiplied in; rows of Q and K head by head, as the model
                         ///< has them before RoPE (rotate-half)
};

/// Low-rank updates of a model's linears, at most one for each.
struct Adapter {
  std::vector<LowRankUpdate> updates;
};

/// Throws Error(kInvalidRequest) naming the tensor, expected and got where `adapter` does not fit the engine of `plan`:
/// layers, modules, ranks, shapes, sizes, an update that is there twice.
void check_adapter(const Adapter& adapter, const Plan& plan);

}  // namespace aotllm
