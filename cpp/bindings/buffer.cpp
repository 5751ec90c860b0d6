// The token buffer, from Python's lists and arrays.
#include "numpy.hpp"

#include <cerrno>
#include <optional>

#include "arrays.hpp"
#include "token_buffer.hpp"

namespace millrace {
namespace {

std::int64_t value_of_large(PyObject* item) {
  if (!PyLong_CheckExact(item)) {
    fail("tokens or lengths hold an object that is not an int");
  }
  const std::int64_t value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return value;
}

// The value of an int and of nothing else: the __index__ of another type may run any code, also some
// that uses this buffer. Small ints hold their value in plain sight; a call takes five times longer.
inline std::int64_t integer_of(PyObject* item) {
  auto* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030c0000
  if (PyLong_CheckExact(item) && PyUnstable_Long_IsCompact(number)) [[likely]] {
    return PyUnstable_Long_CompactValue(number);
  }
#else
  if (PyLong_CheckExact(item) && static_cast<std::size_t>(Py_SIZE(item) + 1) <= 2) [[likely]] {
    return Py_SIZE(item) * static_cast<std::int64_t>(number->ob_digit[0]);  // one digit, or none
  }
#endif
  return value_of_large(item);
}

template <class T>
In<T> array_of(nb::handle numbers) {
  In<T> array;
  if (!nb::try_cast(numbers, array, false)) {  // no conversion: it would cut floats
    fail("lengths or modes are not a plain array of their dtype");
  }
  return array;
}

std::vector<std::int64_t> integers_of(nb::handle numbers) {
  if (!PyList_Check(numbers.ptr())) {
    const auto array = array_of<std::int64_t>(numbers);
    return {array.data(), array.data() + array.shape(0)};
  }
  std::vector<std::int64_t> out;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers.ptr()); ++i) {
    out.push_back(integer_of(PyList_GET_ITEM(numbers.ptr(), i)));
  }
  return out;
}

// The entries as an array; the vector is empty afterwards, and keeps its memory.
template <class T>
Out<T> take_all(std::vector<T>& entries) {
  auto out = allocate<T>(entries.size());
  std::copy(entries.begin(), entries.end(), out.data.get());
  entries.clear();
  return to_numpy(std::move(out));
}

// A call adds all that it is given or, if it throws, nothing; it runs no Python code once it has
// begun to add. So with the GIL no thread and no signal handler sees half of it. Work that takes
// several calls sets `is_busy`: meanwhile additions throw.
class PyTokenBuffer : public TokenBuffer {
 public:
  using TokenBuffer::TokenBuffer;

  // Appends tokens, a list of ints or an array in one contiguous run, that belong to no sequence
  // yet; also while `is_busy` is set.
  std::size_t append(nb::handle tokens) {
    const std::size_t count = append_tokens(tokens);
    num_loose_ += static_cast<std::int64_t>(count);
    return count;
  }

  // Appends tokens as one sequence (`parts` is None) or several (their lengths: a list of ints, or an
  // int64 array), with their modes (None: 0; or an int8 array). Where `tokens` is None, the sequences are
  // made of the tokens that `append` took. Returns whether it is time to flush.
  bool add_sequences(nb::handle tokens, nb::handle parts, nb::handle kinds, bool ends_document) {
    if (tokens.is_none()) {
      finish_sequences(num_loose_, parts, kinds, ends_document);
      num_loose_ = 0;
      return is_full();
    }
    nb::object view;
    if (!PyList_Check(tokens.ptr()) && !PyArray_Check(tokens.ptr())) {
      // A tensor of torch: a view of it in NumPy takes a fifth of the time of an exchange by DLPack.
      view = tokens.attr("numpy")();
      tokens = view;
    }
    check_free();
    add_all([&] {
      const auto count = static_cast<std::int64_t>(append_tokens(tokens));
      finish_sequences(count, parts, kinds, ends_document);
    });
    return is_full();
  }

  // `add_sequences` of a whole document without modes: two arguments less to take apart.
  bool add_document(nb::handle tokens, nb::handle parts) {
    return add_sequences(tokens, parts, Py_None, true);
  }

  // Appends documents of one sequence each, but of none where a document has no tokens. `tokens` as
  // above, where None leaves what the documents do not need; their lengths are an int64 array.
  bool add_documents(nb::handle tokens, const In<std::int64_t>& parts) {
    const std::int64_t sum = sum_of_lengths(span_of(parts));
    if (tokens.is_none()) {
      if (sum > num_loose_) {
        refuse_sum(sum, num_loose_);
      }
      num_loose_ -= sum;
    } else {
      check_free();
      add_all([&] {
        const auto count = static_cast<std::int64_t>(append_tokens(tokens));
        if (sum != count) {
          refuse_sum(sum, count);
        }
      });
    }
    end_documents(span_of(parts));
    return is_full();
  }

  // Ends a document, which has the sequences since the last one ended. `is_alone`: the caller itself
  // has set `is_busy`.
  bool finish_document(bool is_alone) {
    if (!is_alone) {
      check_free();
    }
    end_document();
    return is_full();
  }

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

  bool is_busy_ = false;

 private:
  void check_free() const {
    if (is_busy_) {
      fail("the buffer is being flushed, or closed");
    }
  }

  // Runs `add`, and takes back what it has appended if it throws.
  template <class Add>
  void add_all(Add add) {
    const std::size_t size = num_bytes();
    try {
      add();
    } catch (...) {
      take_back(size);
      throw;
    }
  }

  void finish_sequences(std::int64_t count, nb::handle parts, nb::handle kinds,
                        bool ends_document) {
    std::optional<Column<std::int8_t>> column;
    In<std::int8_t> array;
    if (!kinds.is_none()) {
      array = array_of<std::int8_t>(kinds);
      column = column_of(array);
    }
    const bool is_list = PyList_Check(parts.ptr());
    if (parts.is_none() || (is_list && PyList_GET_SIZE(parts.ptr()) == 1)) {  // most are
      const std::int64_t one = is_list ? integer_of(PyList_GET_ITEM(parts.ptr(), 0)) : count;
      end_sequences(count, std::span(&one, 1), column, ends_document);
    } else {
      end_sequences(count, integers_of(parts), column, ends_document);
    }
  }

  // Returns the number of tokens.
  std::size_t append_tokens(nb::handle tokens) {
    if (PyList_Check(tokens.ptr())) {
      if (has_floats()) {
        fail("tokens of a list cannot be taken as floats");
      }
      const auto count = static_cast<std::size_t>(PyList_GET_SIZE(tokens.ptr()));
      append_each(count, [tokens](std::size_t place) {
        return integer_of(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(place)));
      });
      return count;
    }
    if (!PyArray_Check(tokens.ptr())) {
      fail("tokens are neither a list nor an array");
    }
    auto* array = reinterpret_cast<PyArrayObject*>(tokens.ptr());
    if (PyArray_NDIM(array) != 1) {
      fail("tokens have ", PyArray_NDIM(array), " dimensions; one dimension is needed");
    }
    if (!PyArray_ISCARRAY_RO(array)) {
      fail("tokens must be one contiguous run");
    }
    return append_array(array);
  }

  std::size_t append_array(PyArrayObject* array) {
    const auto count = static_cast<std::size_t>(PyArray_SIZE(array));
    const auto size = static_cast<std::size_t>(PyArray_ITEMSIZE(array));
    if (has_floats()) {
      append_floats(PyArray_DATA(array), count, PyArray_ISFLOAT(array) ? size : 0);
      return count;
    }
    const auto append_as = [&]<class From>(From) {
      TokenBuffer::append(
          std::span<const From>(static_cast<const From*>(PyArray_DATA(array)), count));
    };
    const bool is_signed = PyArray_ISSIGNED(array);
    switch (PyArray_ISINTEGER(array) ? size : 0) {
      case 1: is_signed ? append_as(std::int8_t{}) : append_as(std::uint8_t{}); break;
      case 2: is_signed ? append_as(std::int16_t{}) : append_as(std::uint16_t{}); break;
      case 4: is_signed ? append_as(std::int32_t{}) : append_as(std::uint32_t{}); break;
      case 8: is_signed ? append_as(std::int64_t{}) : append_as(std::uint64_t{}); break;
      default: fail("tokens are not integers; integers are needed");
    }
    return count;
  }

  std::int64_t num_loose_ = 0;  // tokens that belong to no sequence yet
};

}  // namespace

void add_buffer(nb::module_& module) {
  nb::class_<PyTokenBuffer>(module, "TokenBuffer")
      .def(nb::init<const std::string&, std::size_t, int, bool>(), "dtype"_a, "capacity"_a,
           "file"_a = -1, "has_modes"_a = true)
      .def("append", &PyTokenBuffer::append, "tokens"_a)
      .def("add_sequences", &PyTokenBuffer::add_sequences, "tokens"_a.none(),
           "lengths"_a.none() = nb::none(), "modes"_a.none() = nb::none(),
           "ends_document"_a = false)
      .def("add_document", &PyTokenBuffer::add_document, "tokens"_a, "lengths"_a.none())
      .def("add_documents", &PyTokenBuffer::add_documents, "tokens"_a.none(), "lengths"_a)
      .def("end_document", &PyTokenBuffer::finish_document, "is_alone"_a = false)
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
      .def_ro("has_open_document", &PyTokenBuffer::has_open_document)
      .def_rw("is_busy", &PyTokenBuffer::is_busy_);
}

}  // namespace millrace
