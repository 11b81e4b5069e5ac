#pragma once

#include <pybind11/pybind11.h>

namespace aotllm {

/// Each part of `aotllm._runtime`; what they define is typed in `aotllm/_runtime.pyi`.
void bind_errors(pybind11::module_& module);
void bind_constraint(pybind11::module_& module);
void bind_adapter(pybind11::module_& module);
void bind_runners(pybind11::module_& module);
void bind_tuners(pybind11::module_& module);
void bind_stats(pybind11::module_& module);
void bind_manager(pybind11::module_& module);
void bind_tokens(pybind11::module_& module);
void bind_panels(pybind11::module_& module);
void bind_e4m3(pybind11::module_& module);

}  // namespace aotllm
