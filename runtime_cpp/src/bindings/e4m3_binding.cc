#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "aotllm/errors.h"
#include "bindings/bindings.h"
#include "kernels.h"
#include "support/strings.h"

namespace py = pybind11;

namespace aotllm {
namespace {

cpu::FloatType float_type(const py::dtype& type) {
  if (type.kind() == 'f' && type.itemsize() == 4) return cpu::FloatType::kF32;
  if (type.kind() == 'f' && type.itemsize() == 2) return cpu::FloatType::kF16;
  if (type.kind() == 'u' && type.itemsize() == 2) return cpu::FloatType::kBF16;
  throw Error(ErrorKind::kInvalidRequest, "rows: expected float32, float16 or uint16 (the bits of bfloat16)", "rows");
}

/// Rows of weights in memory, `k` values each, one after the other.
struct Rows {
  const std::uint8_t* values = nullptr;
  cpu::FloatType type = cpu::FloatType::kF32;
  py::ssize_t n = 0;
  int k = 0;
};

/// codes[n, last - first], scales[n]; a row that is not finite gets a scale that is not, and no codes.
void quantize(const Rows& rows, int first, int last, const std::vector<float>& factors, std::uint8_t* codes,
              float* scales) {
  const cpu::Kernels& kernels = cpu::kernels();
  const int bytes = rows.type == cpu::FloatType::kF32 ? 4 : 2;
  std::vector<float> row(static_cast<std::size_t>(rows.k));
  for (py::ssize_t i = 0; i < rows.n; ++i) {
    kernels.widen(rows.type, rows.values + i * rows.k * bytes, rows.k, row.data());
    scales[i] = kernels.e4m3_scale(row.data(), rows.k, factors.data(), static_cast<int>(factors.size()));
    if (!std::isfinite(scales[i])) continue;
    kernels.e4m3_codes(row.data() + first, last - first, scales[i], codes + i * (last - first));
  }
}

py::tuple quantize_e4m3(const py::array& array, int first, int last, const std::vector<float>& factors) {
  if (array.ndim() != 2 || (array.flags() & py::array::c_style) == 0) {
    throw Error(ErrorKind::kInvalidRequest, "rows: expected a contiguous array of two dimensions", "rows");
  }
  const Rows rows{static_cast<const std::uint8_t*>(array.data()), float_type(array.dtype()), array.shape(0),
                  static_cast<int>(array.shape(1))};
  if (first < 0 || last < first || last > rows.k) {
    throw Error(ErrorKind::kInvalidRequest,
                cat("columns: got ", first, " to ", last, ", expected some of [0, ", rows.k, ")"), "columns");
  }
  if (factors.empty() || !std::ranges::all_of(factors, [](float f) { return f >= 1.0f && f < 2.0f; })) {
    throw Error(ErrorKind::kInvalidRequest, "factors: expected at least one, each in [1, 2)", "factors");
  }
  py::array_t<std::uint8_t> codes({rows.n, py::ssize_t{last - first}});
  py::array_t<float> scales(rows.n);
  std::uint8_t* const to_codes = codes.mutable_data();
  float* const to_scales = scales.mutable_data();
  {
    const py::gil_scoped_release unlocked;
    quantize(rows, first, last, factors, to_codes, to_scales);
  }
  return py::make_tuple(std::move(codes), std::move(scales));
}

}  // namespace

void bind_e4m3(py::module_& module) {
  module.def("quantize_e4m3", &quantize_e4m3, py::arg("rows"), py::arg("first"), py::arg("last"), py::arg("factors"));
}

}  // namespace aotllm
