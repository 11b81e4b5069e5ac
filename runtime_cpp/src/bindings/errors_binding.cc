#include <pybind11/pybind11.h>

#include <exception>
#include <new>

#include "aotllm/errors.h"
#include "bindings/bindings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

/// Sets the Python error of class `ERROR_KINDS[kind]`. InvalidRequest and its subclasses also take the field's name.
void raise(ErrorKind kind, const char* message, const std::string& param) {
  try {
    const py::object classes = py::module_::import("aotllm.errors").attr("ERROR_KINDS");
    const py::object error_class = classes[error_kind_name(kind)];
    const bool has_param = kind == ErrorKind::kInvalidRequest || kind == ErrorKind::kContextTooLong;
    // Bytes of a damaged file may stand in a message, so it is decoded leniently.
    const py::object text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::char_traits<char>::length(message)), "replace"));
    const py::object error = has_param && !param.empty() ? error_class(text, param) : error_class(text);
    PyErr_SetObject(error_class.ptr(), error.ptr());
  } catch (py::error_already_set& error) {
    error.restore();  // aotllm.errors itself cannot be had
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  static_cast<void>(module);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      raise(error.kind(), error.what(), error.param());
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const py::builtin_exception&) {
      throw;  // pybind11's own: wrong argument types
    } catch (const py::error_already_set&) {
      throw;
    } catch (const std::exception& error) {
      raise(ErrorKind::kInternal, error.what(), {});
    } catch (...) {
      raise(ErrorKind::kInternal, "unknown exception of the runtime", {});
    }
  });
}

}  // namespace aotllm
