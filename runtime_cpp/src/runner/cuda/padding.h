#pragma once

#include "aotllm/model_runner.h"
#include "runner/cuda/step_data.h"

// Steps are padded to few shapes, each of which is a CUDA graph.
namespace aotllm::cuda {

/// Where all sequences run one token, what a graph holds is the whole step; else its layers, which do not depend on the
/// rows that are sampled.
enum class GraphPart { kNone, kLayers, kStep };
GraphPart graph_part(const StepShape& shape);

/// What a step of `shape` is run as, with or without graphs: at least as large, and within what StepData, buffers and
/// kernels take. `head_rows` is the most rows that are sampled.
StepShape padded_shape(const StepShape& shape, const ModelShape& model, int head_rows);

/// What the graph of a padded shape depends on.
StepShape graph_key(const StepShape& shape);

}  // namespace aotllm::cuda
