// The token buffer, from Python's arrays.
#include <cerrno>
#include <optional>

#include "arrays.hpp"
#include "token_buffer.hpp"

namespace millrace {
namespace {

// The entries as an array; the vector is empty afterwards, and keeps its memory.
template <class T>
Out<T> take_all(std::vector<T>& entries) {
  auto out = allocate<T>(entries.size());
  std::copy(entries.begin(), entries.end(), out.data.get());
  entries.clear();
  return to_numpy(std::move(out));
}

class PyTokenBuffer : public TokenBuffer {
 public:
  using TokenBuffer::TokenBuffer;

  void append_array(const AnyVector& tokens) {
    const auto append_as = [&]<class From>(From) {
      if (tokens.dtype() != nb::dtype<From>()) {
        return false;
      }
      append(std::span<const From>(static_cast<const From*>(tokens.data()), tokens.shape(0)));
      return true;
    };
    if (!(append_as(std::int8_t{}) || append_as(std::uint8_t{}) || append_as(std::int16_t{}) ||
          append_as(std::uint16_t{}) || append_as(std::int32_t{}) || append_as(std::uint32_t{}) ||
          append_as(std::int64_t{}) || append_as(std::uint64_t{}) || append_as(float{}) ||
          append_as(double{}))) {
      throw nb::type_error("tokens are not of a dtype of numbers");
    }
  }

  void add_sequences(const In<std::int64_t>& parts, const std::optional<In<std::int8_t>>& kinds,
                     bool ends_document) {
    std::optional<Column<std::int8_t>> column;
    if (kinds) {
      column = column_of(*kinds);
    }
    end_sequences(span_of(parts), column, ends_document);
  }

  void add_documents(const In<std::int64_t>& parts) { end_documents(span_of(parts)); }

  // The bytes in the buffer, until it is changed.
  Out<std::uint8_t> view() { return Out<std::uint8_t>(data(), {num_bytes()}, nb::find(this)); }

  // The lengths and modes of sequences and the ends of documents since the last call.
  std::tuple<Out<std::int32_t>, Out<std::int8_t>, Out<std::int64_t>> take_entries() {
    return {take_all(lengths), take_all(modes), take_all(document_ends)};
  }

  // Counts what reaches the files by another way.
  void count(std::int64_t sequences, std::int64_t documents, std::int64_t tokens) {
    num_sequences += sequences;
    num_documents += documents;
    num_tokens += tokens;
  }

  // Starts to write the buffer to the end of the file, and goes on with an empty one.
  void flush() {
    wait();
    TokenBuffer::flush();
  }

  // Returns when all is written that was flushed.
  void wait() {
    int error = 0;
    {
      nb::gil_scoped_release unlocked;
      error = TokenBuffer::wait();
    }
    if (error != 0) {
      errno = error;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  }

  // Waits, and gives up the descriptor and the memory. The counts stay.
  void close() {
    {
      nb::gil_scoped_release unlocked;
      close_file();
    }
    free_memory();
  }
};

}  // namespace

void add_buffer(nb::module_& module) {
  nb::class_<PyTokenBuffer>(module, "TokenBuffer")
      .def(nb::init<const std::string&, std::size_t, int, bool>(), "dtype"_a, "capacity"_a,
           "file"_a = -1, "has_modes"_a = true)
      .def("append", &PyTokenBuffer::append_array, "tokens"_a.noconvert())
      .def("add_sequences", &PyTokenBuffer::add_sequences, "lengths"_a, "modes"_a = nb::none(),
           "ends_document"_a = false)
      .def("add_documents", &PyTokenBuffer::add_documents, "lengths"_a)
      .def("end_document", &PyTokenBuffer::end_document)
      .def("count", &PyTokenBuffer::count, "num_sequences"_a, "num_documents"_a, "num_tokens"_a)
      .def("view", &PyTokenBuffer::view)
      .def("take_entries", &PyTokenBuffer::take_entries)
      .def("flush", &PyTokenBuffer::flush)
      .def("wait", &PyTokenBuffer::wait)
      .def("close", &PyTokenBuffer::close)
      .def_prop_ro("is_full", &PyTokenBuffer::is_full)
      .def_prop_ro("num_bytes", &PyTokenBuffer::num_bytes)
      .def_ro("num_tokens", &PyTokenBuffer::num_tokens)
      .def_ro("num_sequences", &PyTokenBuffer::num_sequences)
      .def_ro("num_documents", &PyTokenBuffer::num_documents)
      .def_ro("has_open_document", &PyTokenBuffer::has_open_document);
}

}  // namespace millrace
