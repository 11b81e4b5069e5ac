#include <pybind11/pybind11.h>

#include "aotllm/make_runner.h"
#include "bindings/bindings.h"
#include "kernels.h"
#include "support/cpu_topology.h"

PYBIND11_MODULE(_runtime, module) {
  module.doc() = "The compiled runtime of aotllm: runners and in-flight-batching manager.";
  aotllm::bind_errors(module);
  module.def("cpu_isa", [] { return aotllm::cpu::kernels().isa; });
  module.def("has_cuda", &aotllm::has_cuda);
  module.def("default_num_threads", &aotllm::default_num_threads);
  aotllm::bind_adapter(module);
  aotllm::bind_runners(module);
  aotllm::bind_tuners(module);
  aotllm::bind_stats(module);
  aotllm::bind_constraint(module);
  aotllm::bind_manager(module);
  aotllm::bind_tokens(module);
  aotllm::bind_panels(module);
  aotllm::bind_e4m3(module);
}
