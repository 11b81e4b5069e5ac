#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "bindings/bindings.h"
#include "support/strings.h"
#include "tokenization/compact_tokens.h"

namespace aotllm {
namespace {

namespace py = pybind11;

/// Goes through UTF-8 text by characters, which are what Python counts in.
class Characters {
 public:
  explicit Characters(std::string_view text) : text_(text) {}

  /// Where character `index` begins, in bytes. `index` never falls from call to call.
  std::size_t byte_of(std::size_t index) {
    while (character_ < index && at_ < text_.size()) {
      ++at_;
      while (at_ < text_.size() && (static_cast<std::uint8_t>(text_[at_]) & 0xC0) == 0x80) ++at_;
      ++character_;
    }
    return at_;
  }

 private:
  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t character_ = 0;
};

/// `pieces[i]` != 0 is the number of an added token; 0 = the characters [first, last) of text are a word.
std::vector<TokenId> encode(const CompactTokens& self, const std::string& text, const std::vector<std::int64_t>& pieces,
                            const std::vector<std::pair<std::size_t, std::size_t>>& spans,
                            const std::vector<TokenId>& added) {
  if (pieces.size() != spans.size()) {
    throw Error(ErrorKind::kInternal, cat("encode: ", pieces.size(), " pieces and ", spans.size(), " spans"));
  }
  const py::gil_scoped_release release;
  std::vector<TokenId> ids;
  ids.reserve(pieces.size());
  Characters characters(text);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i] != 0) {
      ids.push_back(added.at(static_cast<std::size_t>(pieces[i])));
      continue;
    }
    const std::size_t begin = characters.byte_of(spans[i].first);
    const std::size_t end = characters.byte_of(spans[i].second);
    self.encode(std::string_view(text).substr(begin, end - begin), ids);
  }
  return ids;
}

py::object spelling(const CompactTokens& self, std::int64_t id) {
  const auto text = self.spelling(id);
  if (!text) return py::none();
  return py::str(text->data(), text->size());
}

}  // namespace

void bind_tokens(py::module_& module) {
  py::class_<CompactTokens>(module, "CompactTokens", "The vocabulary and merges of an engine's `tokenizer.tokens`.")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("__len__", &CompactTokens::size)
      .def("id_to_token", &spelling, py::arg("token_id"))
      .def("token_to_id", &CompactTokens::find, py::arg("token"))
      .def("special_ids", [](const CompactTokens& self) { return self.with_flags(kTokenSpecial); })
      .def("markup_ids", [](const CompactTokens& self) { return self.with_flags(kTokenMarkup); })
      .def(
          "text",
          [](const CompactTokens& self, const std::string& tensor) {
            const std::string_view text = self.text(tensor);
            return py::str(text.data(), text.size());
          },
          py::arg("name"))
      .def("encode", &encode, py::arg("text"), py::arg("pieces"), py::arg("spans"), py::arg("added"));
}

}  // namespace aotllm
