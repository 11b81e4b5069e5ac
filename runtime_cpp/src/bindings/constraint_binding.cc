#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/constraint.h"
#include "aotllm/errors.h"
#include "bindings/bindings.h"
#include "support/strings.h"

namespace aotllm {
namespace {

namespace py = pybind11;

GrammarKind parse_kind(const std::string& name) {
  if (name == "json_schema") return GrammarKind::kJsonSchema;
  if (name == "regex") return GrammarKind::kRegex;
  if (name == "lark") return GrammarKind::kLark;
  throw Error(ErrorKind::kInvalidRequest, cat("kind: expected json_schema, regex or lark, got \"", name, '"'), "kind");
}

std::unique_ptr<GrammarCompiler> make_compiler(const std::string& library_path, const std::vector<py::bytes>& tokens,
                                               std::vector<TokenId> eos_token_ids, std::int32_t vocab_size,
                                               double max_compile_seconds) {
  GrammarVocabulary vocabulary{{tokens.begin(), tokens.end()}, std::move(eos_token_ids), vocab_size};
  GrammarLimits limits;
  limits.max_compile_seconds = max_compile_seconds;
  const py::gil_scoped_release release;
  return std::make_unique<GrammarCompiler>(library_path, vocabulary, limits);
}

/// The mask in numpy's hands. [⌈vocab_size / 32⌉]
py::array_t<std::uint32_t> mask_of(Constraint& constraint, std::int32_t vocab_size) {
  py::array_t<std::uint32_t> mask((static_cast<py::ssize_t>(std::max(vocab_size, 0)) + 31) / 32);
  constraint.fill_mask({mask.mutable_data(), static_cast<std::size_t>(mask.size())});
  return mask;
}

}  // namespace

void bind_constraint(py::module_& module) {
  // Calls take the GIL, which is the lock that a state needs: it has none of its own.
  py::class_<Constraint, std::shared_ptr<Constraint>>(module, "Constraint", "A state of a compiled grammar.")
      .def(
          "clone", [](const Constraint& self) { return std::shared_ptr<Constraint>(self.clone()); },
          "A copy of the state, which goes its own way.")
      .def("mask", &mask_of, py::arg("vocab_size"),
           "What may come next, end tokens included: bit t % 32 of word t / 32. Raises InvalidRequest where nothing "
           "may.")
      .def("accept", &Constraint::accept, py::arg("token"), "Advances by an allowed token; raises Internal for others.")
      .def("take_forced", &Constraint::take_forced, py::arg("limit"),
           "Tokens that must come next, at most `limit`; advances past them.")
      .def_property_readonly("finished", &Constraint::finished);

  py::class_<GrammarCompiler>(module, "GrammarCompiler", "Compiles grammars for one vocabulary. Thread-safe.")
      .def(py::init(&make_compiler), py::arg("library_path"), py::arg("tokens"), py::arg("eos_token_ids"),
           py::arg("vocab_size"), py::arg("max_compile_seconds") = GrammarLimits{}.max_compile_seconds)
      .def(
          "compile",
          [](const GrammarCompiler& self, const std::string& kind, const std::string& text, const std::string& param) {
            const Grammar grammar{parse_kind(kind), text, param};
            const py::gil_scoped_release release;
            return std::shared_ptr<Constraint>(self.compile(grammar));
          },
          py::arg("kind"), py::arg("text"), py::arg("param"),
          "The start state; `kind`: json_schema | regex | lark. Raises InvalidRequest or Overloaded.")
      .def_property_readonly("library_version", &GrammarCompiler::library_version);
}

}  // namespace aotllm
