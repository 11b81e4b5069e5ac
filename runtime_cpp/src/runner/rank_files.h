#pragma once

#include <string>
#include <vector>

#include "aotllm/engine.h"

namespace aotllm {

/// The engines of all ranks, in order: that of `rank_file`, and where it is one of several, those of the files beside
/// it. Throws as Engine::load, and as check_ranks.
std::vector<Engine> load_ranks(const std::string& rank_file);

/// Throws Error(kEngineIncompatible) unless `engines` are all ranks of one build, in order.
void check_ranks(const std::vector<Engine>& engines);

}  // namespace aotllm
