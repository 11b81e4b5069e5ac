#pragma once

namespace aotllm::cuda {

/// The compute capability that the general kernels of this build, which are all but those for SM90 alone, were compiled
/// for as the current device runs them: of machine code its own, of PTX, which any later device runs, that of the PTX.
/// 0 where this build has none for the device.
int compiled_sm();

}  // namespace aotllm::cuda
