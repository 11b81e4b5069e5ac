#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "aotllm/errors.h"
#include "bindings/bindings.h"
#include "kernels.h"
#include "support/page_buffer.h"
#include "support/strings.h"

namespace py = pybind11;

namespace aotllm {
namespace {

using Panels = py::array_t<std::uint8_t, py::array::c_style>;

py::array_t<float> dequantize_panels(const std::string& format, int n, int k, const Panels& panels) {
  cpu::Segment segment;
  if (!cpu::parse_format(format.c_str(), segment.format) || n < 1 || k < 1 ||
      (!cpu::is_float_format(segment.format) && k % cpu::kWeightBlock != 0)) {
    throw Error(ErrorKind::kInvalidRequest, cat("no segment is \"", format, "\" of ", n, " x ", k));
  }
  const std::size_t bytes = cpu::segment_bytes(segment.format, n, k);
  if (static_cast<std::size_t>(panels.size()) != bytes) {
    throw Error(ErrorKind::kInvalidRequest, cat("panels: expected ", bytes, " bytes, got ", panels.size()), "panels");
  }
  PageBuffer aligned(bytes);
  std::copy_n(panels.data(), bytes, aligned.data());
  segment.n = n;
  segment.k = k;
  segment.panels = aligned.data();
  py::array_t<float> out({n, k});
  for (int row = 0; row < n; ++row) {
    cpu::kernels().dequantize_row(segment, row, 1.0f, out.mutable_data() + std::ptrdiff_t{row} * k);
  }
  return out;
}

}  // namespace

void bind_panels(py::module_& module) {
  module.def("dequantize_panels", &dequantize_panels, py::arg("format"), py::arg("n"), py::arg("k"), py::arg("panels"),
             "The weights [n, k] of a packed segment, as the kernels read them.");
}

}  // namespace aotllm
