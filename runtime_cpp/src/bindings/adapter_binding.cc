#include "aotllm/adapter.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "bindings/bindings.h"
#include "support/strings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

using Matrix = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::int32_t dimension(const char* param, const Matrix& matrix, int axis) {
  if (matrix.ndim() != 2) {
    throw Error(ErrorKind::kInvalidRequest, cat(param, ": expected two dimensions, got ", matrix.ndim()), param);
  }
  const py::ssize_t size = matrix.shape(axis);
  if (size > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorKind::kInvalidRequest, cat(param, ": expected fewer than 2^31 rows and columns, got ", size),
                param);
  }
  return static_cast<std::int32_t>(size);
}

void add_update(Adapter& self, std::int32_t layer, const std::string& module, const Matrix& a, const Matrix& b) {
  LowRankUpdate update;
  if (!parse_adapter_module(module, update.module)) {
    throw Error(ErrorKind::kInvalidRequest, cat("module: expected q, k, v, o, gate, up or down, got \"", module, '"'),
                "module");
  }
  update.layer = layer;
  update.rank = dimension("a", a, 0);
  update.in = dimension("a", a, 1);
  update.out = dimension("b", b, 0);
  if (dimension("b", b, 1) != update.rank) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("b: expected ", update.rank, " columns, the rows of a, got ", b.shape(1)), "b");
  }
  update.a.assign(a.data(), a.data() + a.size());
  update.b.assign(b.data(), b.data() + b.size());
  self.updates.push_back(std::move(update));
}

}  // namespace

void bind_adapter(py::module_& module) {
  py::class_<Adapter>(module, "Adapter", "Low-rank updates of a model's linears, to be loaded into a runner.")
      .def(py::init<>())
      .def("add", &add_update, py::arg("layer"), py::arg("module"), py::arg("a"), py::arg("b"),
           "y += b · (a · x) beside a linear: a [rank, in], b [out, rank] with the scale multiplied in; both copied.")
      .def("__len__", [](const Adapter& self) { return self.updates.size(); });
}

}  // namespace aotllm
