// The one file that knows Python: arrays in, arrays out, the GIL released around each kernel.
// Shapes, dtypes and ranges are checked in src/millrace/_native.py; the kernels check what only
// reading the arrays can show, and throw std::invalid_argument, which Python sees as ValueError.
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>  // for views alone: NumPy makes one in half the time of Python's a[i:j]

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "blend.hpp"
#include "buffer.hpp"
#include "check_index.hpp"
#include "column.hpp"
#include "gather.hpp"
#include "mapping.hpp"
#include "mt19937.hpp"
#include "narrow.hpp"
#include "ragged.hpp"
#include "sample_index.hpp"
#include "shuffle.hpp"
#include "write_behind.hpp"

namespace nb = nanobind;

namespace millrace {
namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
Column<T> column_of(const In<T>& array) {
  return {array.data(), array.shape(0)};
}

// For kernels that read plain arrays.
template <class T>
std::span<const T> span_of(const In<T>& array) {
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0) {
    throw std::invalid_argument("an array is not aligned to its numbers' size");
  }
  return {array.data(), array.shape(0)};
}

template <class T>
Out<T> to_numpy(Buffer<T> buffer, std::initializer_list<std::size_t> shape) {
  T* data = buffer.data.release();
  nb::capsule owner(data, [](void* pointer) noexcept { FreeMemory{}(pointer); });
  return Out<T>(data, shape, owner);
}

template <class T>
Out<T> to_numpy(Buffer<T> buffer) {
  const std::size_t size = buffer.size;
  return to_numpy(std::move(buffer), {size});
}

// ---- shuffle ----

// The state after the draws, as numpy.random.RandomState.set_state() takes it.
using RandomState = std::tuple<Out<std::uint32_t>, int>;

Mt19937 random_from(const In<std::uint32_t>& key, int position) {
  if (key.shape(0) != Mt19937::state_size || position < 0 || position > Mt19937::state_size) {
    throw std::invalid_argument("an MT19937 state has 624 words and a position in [0, 624]");
  }
  Mt19937::Key words;
  std::copy_n(key.data(), words.size(), words.begin());
  return {words, position};
}

RandomState state_of(const Mt19937& random) {
  auto key = allocate<std::uint32_t>(Mt19937::state_size);
  std::copy(random.key().begin(), random.key().end(), key.data.get());
  return {to_numpy(std::move(key)), random.position()};
}

template <class T>
std::tuple<Out<T>, RandomState> py_shuffled(const In<T>& values, const In<std::uint32_t>& key,
                                            int position) {
  Mt19937 random = random_from(key, position);
  auto out = allocate<T>(values.shape(0));
  {
    nb::gil_scoped_release unlocked;
    std::copy_n(values.data(), values.shape(0), out.data.get());
    shuffle(out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

template <class T>
std::tuple<Out<T>, RandomState> py_shuffled_ranges(const In2<std::int64_t>& ranges,
                                                   const In<std::uint32_t>& key, int position) {
  Mt19937 random = random_from(key, position);
  std::vector<Range> list;
  std::size_t size = 0;
  for (std::size_t i = 0; i < ranges.shape(0); ++i) {
    list.push_back({ranges(i, 0), ranges(i, 1), ranges(i, 2)});
    size += static_cast<std::size_t>(list.back().size());
  }
  auto out = allocate<T>(size);
  {
    nb::gil_scoped_release unlocked;
    shuffle_ranges(list, out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

std::tuple<Out<std::int64_t>, RandomState> py_draw_targets(std::int64_t first, std::int64_t count,
                                                           const In<std::uint32_t>& key,
                                                           int position) {
  Mt19937 random = random_from(key, position);
  auto out = allocate<std::int64_t>(static_cast<std::size_t>(count));
  {
    nb::gil_scoped_release unlocked;
    draw_targets(first, out.span(), random);
  }
  return {to_numpy(std::move(out)), state_of(random)};
}

// ---- sample index ----

template <class T>
Out<T> py_sample_index(const In<std::int32_t>& sequence_lengths,
                       const In<std::int32_t>& document_index, std::int64_t sequence_length,
                       std::int64_t num_samples, bool add_extra_token, bool allow_partial) {
  const auto num_rows = static_cast<std::size_t>(num_samples) + 1;
  auto rows = allocate<T>(2 * num_rows);
  {
    nb::gil_scoped_release unlocked;
    walk_samples(column_of(sequence_lengths), column_of(document_index), sequence_length,
                 std::int64_t{add_extra_token ? 1 : 0}, allow_partial, rows.span());
  }
  return to_numpy(std::move(rows), {num_rows, std::size_t{2}});
}

// ---- blend ----

using Blend = std::tuple<Out<std::int16_t>, Out<std::int64_t>>;

Blend py_blend_by_weights(const In<double>& weights, std::int64_t size, int threads) {
  auto dataset_index = allocate<std::int16_t>(static_cast<std::size_t>(size));
  auto dataset_sample_index = allocate<std::int64_t>(static_cast<std::size_t>(size));
  {
    nb::gil_scoped_release unlocked;
    blend_by_weights(span_of(weights), dataset_index.span(), dataset_sample_index.span(), threads);
  }
  return {to_numpy(std::move(dataset_index)), to_numpy(std::move(dataset_sample_index))};
}

Blend py_blend_by_sizes(const In<std::int64_t>& sizes, std::int64_t total, int threads) {
  auto dataset_index = allocate<std::int16_t>(static_cast<std::size_t>(total));
  auto dataset_sample_index = allocate<std::int64_t>(static_cast<std::size_t>(total));
  {
    nb::gil_scoped_release unlocked;
    blend_by_sizes(span_of(sizes), dataset_index.span(), dataset_sample_index.span(), threads);
  }
  return {to_numpy(std::move(dataset_index)), to_numpy(std::move(dataset_sample_index))};
}

// ---- token files ----

std::vector<Piece> pieces_from(const In<std::int64_t>& offsets, const In<std::int64_t>& counts) {
  if (offsets.shape(0) != counts.shape(0)) {
    throw std::invalid_argument("byte_offsets and byte_counts differ in size");
  }
  std::vector<Piece> pieces(offsets.shape(0));
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {column_of(offsets)[i], column_of(counts)[i]};
  }
  return pieces;
}

Out<std::uint8_t> py_copy_pieces(const In<std::uint8_t>& bytes, const In<std::int64_t>& offsets,
                                 const In<std::int64_t>& counts) {
  Buffer<std::uint8_t> out;
  {
    nb::gil_scoped_release unlocked;
    const std::vector<Piece> pieces = pieces_from(offsets, counts);
    const auto size = static_cast<std::int64_t>(bytes.shape(0));
    out = allocate<std::uint8_t>(static_cast<std::size_t>(total_size(pieces, size)));
    read_mapped([&] { copy_pieces(span_of(bytes), pieces, out.span()); });
  }
  return to_numpy(std::move(out));
}

Out<std::uint8_t> py_read_pieces(int descriptor, std::int64_t num_bytes,
                                 const In<std::int64_t>& offsets,
                                 const In<std::int64_t>& counts) {
  Buffer<std::uint8_t> out;
  {
    nb::gil_scoped_release unlocked;
    const std::vector<Piece> pieces = pieces_from(offsets, counts);
    out = allocate<std::uint8_t>(static_cast<std::size_t>(total_size(pieces, num_bytes)));
    read_pieces(descriptor, pieces, out.span());
  }
  return to_numpy(std::move(out));
}

std::tuple<Out<std::uint8_t>, Out<std::int64_t>> py_copy_sequences(
    const In<std::uint8_t>& bytes, const In<std::int64_t>& pointers,
    const In<std::int32_t>& lengths, const In<std::int64_t>& ids, std::int64_t token_size) {
  if (pointers.shape(0) != lengths.shape(0)) {
    throw std::invalid_argument("pointers and lengths differ in size");
  }
  Buffer<std::uint8_t> out;
  auto offsets = allocate<std::int64_t>(ids.shape(0) + 1);
  {
    nb::gil_scoped_release unlocked;
    std::vector<Piece> pieces(ids.shape(0));
    read_mapped([&] {
      locate_sequences(column_of(pointers), column_of(lengths), column_of(ids), token_size, pieces,
                       offsets.span());
    });
    const auto size = static_cast<std::int64_t>(bytes.shape(0));
    out = allocate<std::uint8_t>(static_cast<std::size_t>(total_size(pieces, size)));
    read_mapped([&] { copy_pieces(span_of(bytes), pieces, out.span()); });
  }
  return {to_numpy(std::move(out)), to_numpy(std::move(offsets))};
}

std::tuple<std::int64_t, std::int64_t> py_first_bad_sequence(const In<std::int32_t>& lengths,
                                                             const In<std::int64_t>& pointers,
                                                             std::int64_t token_size,
                                                             std::int64_t byte_offset) {
  if (lengths.shape(0) != pointers.shape(0)) {
    throw std::invalid_argument("lengths and pointers differ in size");
  }
  nb::gil_scoped_release unlocked;
  std::tuple<std::int64_t, std::int64_t> found{0, byte_offset};
  read_mapped([&] {
    std::get<0>(found) = first_bad_sequence(column_of(lengths), column_of(pointers), token_size,
                                            std::get<1>(found));
  });
  return found;
}

std::int64_t py_first_bad_document(const In<std::int64_t>& entries, std::int64_t num_sequences) {
  nb::gil_scoped_release unlocked;
  std::int64_t place = 0;
  read_mapped([&] { place = first_bad_document(column_of(entries), num_sequences); });
  return place;
}

// The whole of an open file, mapped: it stays so when the descriptor is closed.
nb::ndarray<nb::numpy, const std::uint8_t> py_map_file(int descriptor, std::size_t size) {
  if (size == 0) {  // cannot be mapped
    static constexpr std::uint8_t nothing = 0;
    return {&nothing, {0}, nb::handle()};
  }
  struct Mapped {
    const std::uint8_t* start;
    std::size_t size;
  };
  auto mapped = std::make_unique<Mapped>(Mapped{map_file(descriptor, size), size});
  nb::capsule owner(mapped.release(), [](void* pointer) noexcept {
    const std::unique_ptr<Mapped> last(static_cast<Mapped*>(pointer));
    unmap_file(last->start, last->size);
  });
  const auto* start = static_cast<const Mapped*>(owner.data())->start;
  return {start, {size}, owner};
}

void py_start_writeback(int file, std::int64_t start, std::int64_t size) {
  nb::gil_scoped_release unlocked;
  start_writeback(file, start, size);
}

// Documents on their way to a token file: tokens, each checked and narrowed to the file's dtype, the
// lengths and modes of sequences, and where documents end. Full buffers are written by a thread that
// needs no Python, while the next one fills.
//
// A call adds all that it is given or, if it throws, nothing; it runs no Python code once it has
// begun to add. So with the GIL no thread and no signal handler sees half of it. What takes several
// calls is fenced off by `is_busy`: meanwhile additions throw.
class PyTokenBuffer {
 public:
  // A negative `file` is none: then nothing can be flushed. Without modes none are noted.
  PyTokenBuffer(const std::string& dtype, std::size_t capacity, int file, bool has_modes)
      : dtype_(dtype),
        kind_(kind_of(dtype)),
        has_modes_(has_modes),
        capacity_(capacity),
        bytes_(allocate<std::uint8_t>(capacity)),
        writer_(file) {}

  // Appends tokens, a list of ints or an array in one contiguous run, that belong to no sequence
  // yet. Whether `is_busy` makes no difference here.
  std::size_t append(nb::handle tokens) {
    const std::size_t count = append_tokens(tokens);
    num_loose_ += static_cast<std::int64_t>(count);
    return count;
  }

  // Appends tokens as one sequence (`lengths` is None) or several (a list of ints, or an int64
  // array), with their modes (None: 0; or an int8 array). Where `tokens` is None, the sequences are
  // made of the tokens that `append` took. Returns whether it is time to flush.
  bool add_sequences(nb::handle tokens, nb::handle lengths, nb::handle modes, bool ends_document) {
    if (tokens.is_none()) {
      end_sequences(num_loose_, lengths, modes, ends_document);
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
    const std::size_t used = used_;
    const auto count = static_cast<std::int64_t>(append_tokens(tokens));
    try {
      end_sequences(count, lengths, modes, ends_document);
    } catch (...) {
      used_ = used;
      throw;
    }
    return is_full();
  }

  // `add_sequences` of a whole document without modes: two arguments less to take apart.
  bool add_document(nb::handle tokens, nb::handle lengths) {
    return add_sequences(tokens, lengths, Py_None, true);
  }

  // Appends documents of one sequence each, but of none where a document has no tokens. `tokens` as
  // above, where None leaves what the documents do not need; their lengths are an int64 array.
  bool add_documents(nb::handle tokens, const In<std::int64_t>& lengths) {
    std::int64_t sum = 0;
    for (const std::int64_t length : span_of(lengths)) {
      check_length(length);
      sum += length;  // int32 each, so that no array in memory can overflow it
    }
    if (tokens.is_none()) {
      if (sum > num_loose_) {
        refuse_sum(sum, num_loose_);
      }
      num_loose_ -= sum;
    } else {
      check_free();
      const std::size_t used = used_;
      const auto count = static_cast<std::int64_t>(append_tokens(tokens));
      if (sum != count) {
        used_ = used;
        refuse_sum(sum, count);
      }
    }
    for (const std::int64_t length : span_of(lengths)) {
      if (length > 0) {
        end_sequence(length, 0);
      }
      end_document();
    }
    return is_full();
  }

  // Ends a document, which has the sequences since the last one ended. `is_alone`: the caller is the
  // one that has fenced the others off.
  bool finish_document(bool is_alone) {
    if (!is_alone) {
      check_free();
    }
    end_document();
    return is_full();
  }

  bool is_full() const noexcept {
    return used_ >= capacity_ || lengths_.size() >= max_entries ||
           document_ends_.size() >= max_entries;
  }

  // Whether sequences were added that belong to no document yet.
  bool has_open_document() const noexcept { return has_open_document_; }

  std::size_t num_bytes() const noexcept { return used_; }

  // What is in the buffer, until it is changed.
  Out<std::uint8_t> view() { return Out<std::uint8_t>(bytes_.data.get(), {used_}, nb::find(this)); }

  // The lengths and modes of sequences and the ends of documents since the last call.
  std::tuple<Out<std::int32_t>, Out<std::int8_t>, Out<std::int64_t>> take_entries() {
    return {take_all(lengths_), take_all(modes_), take_all(document_ends_)};
  }

  // Counts what reaches the files by another way.
  void count(std::int64_t num_sequences, std::int64_t num_documents, std::int64_t num_tokens) {
    num_sequences_ += num_sequences;
    num_documents_ += num_documents;
    num_tokens_ += num_tokens;
  }

  // Starts to write the buffer to the end of the file, and goes on with an empty one.
  void flush() {
    wait();
    writer_.start(bytes_, std::exchange(used_, 0));
    if (bytes_.size < capacity_) {
      bytes_ = allocate<std::uint8_t>(capacity_);
    }
  }

  // Returns when all is written that was flushed.
  void wait() {
    int error = 0;
    {
      nb::gil_scoped_release unlocked;
      error = writer_.wait();
    }
    if (error != 0) {
      errno = error;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  }

  // Gives up the descriptor and the memory, when what is being written is written. The counts stay.
  void close() {
    {
      nb::gil_scoped_release unlocked;
      writer_.close();
    }
    bytes_ = {};
    used_ = capacity_ = 0;
  }

  std::int64_t num_sequences_ = 0;
  std::int64_t num_documents_ = 0;
  std::int64_t num_tokens_ = 0;  // of all sequences
  bool is_busy_ = false;

 private:
  using Kind = std::variant<std::uint8_t, std::int8_t, std::int16_t, std::uint16_t, std::int32_t,
                            std::int64_t, float, double>;
  static constexpr std::size_t max_entries = std::size_t{1} << 16;

  static Kind kind_of(const std::string& dtype) {
    if (dtype == "uint8") return std::uint8_t{};
    if (dtype == "int8") return std::int8_t{};
    if (dtype == "int16") return std::int16_t{};
    if (dtype == "uint16") return std::uint16_t{};
    if (dtype == "int32") return std::int32_t{};
    if (dtype == "int64") return std::int64_t{};
    if (dtype == "float32") return float{};
    if (dtype == "float64") return double{};
    throw std::invalid_argument("tokens cannot be buffered as " + dtype);
  }

  void check_free() const {
    if (is_busy_) {
      throw std::invalid_argument("the buffer is being flushed, or closed");
    }
  }

  template <class T>
  static Out<T> take_all(std::vector<T>& entries) {
    auto out = allocate<T>(entries.size());
    std::copy(entries.begin(), entries.end(), out.data.get());
    entries.clear();
    return to_numpy(std::move(out));
  }

  static void check_length(std::int64_t length) {
    if (!std::in_range<std::int32_t>(length) || length < 0) {
      throw std::invalid_argument("the sequences' lengths hold " + std::to_string(length) +
                                  "; 0 to 2147483647 is possible");
    }
  }

  [[noreturn]] static void refuse_sum(std::int64_t sum, std::int64_t count) {
    throw std::invalid_argument("the sequences' lengths sum to " + std::to_string(sum) +
                                "; there are " + std::to_string(count) + " tokens");
  }

  void end_sequence(std::int64_t length, std::int8_t mode) {
    lengths_.push_back(static_cast<std::int32_t>(length));
    if (has_modes_) {
      modes_.push_back(mode);
    }
    num_tokens_ += length;
    ++num_sequences_;
    has_open_document_ = true;
  }

  void end_document() {
    document_ends_.push_back(num_sequences_);
    ++num_documents_;
    has_open_document_ = false;
  }

  void end_sequences(std::int64_t count, nb::handle lengths, nb::handle modes, bool ends_document) {
    const bool is_one = lengths.is_none() || (PyList_Check(lengths.ptr()) &&
                                              PyList_GET_SIZE(lengths.ptr()) == 1);
    if (is_one && modes.is_none()) {  // by far the most
      const std::int64_t length =
          lengths.is_none() ? count : integer_of(PyList_GET_ITEM(lengths.ptr(), 0));
      check_length(length);
      if (length != count) {
        refuse_sum(length, count);
      }
      end_sequence(length, 0);
    } else {
      end_each(count, lengths, modes);
    }
    if (ends_document) {
      end_document();
    }
  }

  void end_each(std::int64_t count, nb::handle lengths, nb::handle modes) {
    const std::vector<std::int64_t> parts =
        lengths.is_none() ? std::vector<std::int64_t>{count} : integers_of(lengths);
    std::int64_t sum = 0;
    for (const std::int64_t length : parts) {
      check_length(length);
      sum += length;
    }
    if (sum != count) {
      refuse_sum(sum, count);
    }
    const auto kinds = modes.is_none() ? In<std::int8_t>() : array_of<std::int8_t>(modes);
    if (kinds.is_valid() && kinds.shape(0) != parts.size()) {
      throw std::invalid_argument("there are " + std::to_string(kinds.shape(0)) + " modes for " +
                                  std::to_string(parts.size()) + " sequences");
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      end_sequence(parts[i], kinds.is_valid() ? kinds(i) : std::int8_t{0});
    }
  }

  template <class T>
  static In<T> array_of(nb::handle numbers) {
    In<T> array;
    if (!nb::try_cast(numbers, array, false)) {  // no conversion: it would cut floats
      throw std::invalid_argument("lengths or modes are no plain array of their dtype");
    }
    return array;
  }

  static std::vector<std::int64_t> integers_of(nb::handle numbers) {
    std::vector<std::int64_t> out;
    if (PyList_Check(numbers.ptr())) {
      const Py_ssize_t size = PyList_GET_SIZE(numbers.ptr());
      for (Py_ssize_t i = 0; i < size; ++i) {
        out.push_back(integer_of(PyList_GET_ITEM(numbers.ptr(), i)));
      }
    } else {
      const auto array = array_of<std::int64_t>(numbers);
      out.assign(array.data(), array.data() + array.shape(0));
    }
    return out;
  }

  template <class To>
  [[noreturn]] void refuse(const std::string& token) const {
    using Limits = std::numeric_limits<To>;
    throw std::invalid_argument("token " + token + " does not fit " + dtype_ + ", which holds " +
                                std::to_string(Limits::min()) + " to " +
                                std::to_string(Limits::max()));
  }

  // The number of tokens that were appended.
  std::size_t append_tokens(nb::handle tokens) {
    if (PyList_Check(tokens.ptr())) {
      std::visit([&]<class To>(To) { append_items<To>(tokens); }, kind_);
      return static_cast<std::size_t>(PyList_GET_SIZE(tokens.ptr()));
    }
    if (!PyArray_Check(tokens.ptr())) {
      throw std::invalid_argument("tokens are neither a list nor an array");
    }
    return append_array(reinterpret_cast<PyArrayObject*>(tokens.ptr()));
  }

  std::size_t append_array(PyArrayObject* array) {
    if (PyArray_NDIM(array) != 1) {
      throw std::invalid_argument("tokens have " + std::to_string(PyArray_NDIM(array)) +
                                  " dimensions; one dimension is needed");
    }
    if (!PyArray_ISCARRAY_RO(array)) {
      throw std::invalid_argument("tokens must be one contiguous run");
    }
    const auto count = static_cast<std::size_t>(PyArray_SIZE(array));
    if (std::holds_alternative<float>(kind_) || std::holds_alternative<double>(kind_)) {
      append_floats(array, count);
      return count;
    }
    const auto append_as_type = [&]<class From>(From) {
      append_values(std::span<const From>(static_cast<const From*>(PyArray_DATA(array)), count));
    };
    const bool is_signed = PyArray_ISSIGNED(array);
    switch (PyArray_ISINTEGER(array) ? PyArray_ITEMSIZE(array) : 0) {
      case 1: is_signed ? append_as_type(std::int8_t{}) : append_as_type(std::uint8_t{}); break;
      case 2: is_signed ? append_as_type(std::int16_t{}) : append_as_type(std::uint16_t{}); break;
      case 4: is_signed ? append_as_type(std::int32_t{}) : append_as_type(std::uint32_t{}); break;
      case 8: is_signed ? append_as_type(std::int64_t{}) : append_as_type(std::uint64_t{}); break;
      default: throw std::invalid_argument("tokens are no integers; integers are needed");
    }
    return count;
  }

  void append_floats(PyArrayObject* array, std::size_t count) {
    const std::size_t width = std::visit([](auto zero) { return sizeof(zero); }, kind_);
    if (!PyArray_ISFLOAT(array) || static_cast<std::size_t>(PyArray_ITEMSIZE(array)) != width) {
      throw std::invalid_argument("tokens are not " + dtype_);
    }
    make_room(count * width);
    if (count > 0) {
      std::memcpy(bytes_.data.get() + used_, PyArray_DATA(array), count * width);
    }
    used_ += count * width;
  }

  template <class To>
  void append_items(nb::handle tokens) {
    if constexpr (std::is_floating_point_v<To>) {
      throw std::invalid_argument("tokens of a list cannot be taken as " + dtype_);
    } else {
      const auto count = static_cast<std::size_t>(PyList_GET_SIZE(tokens.ptr()));
      make_room(count * sizeof(To));
      To* out = reinterpret_cast<To*>(bytes_.data.get() + used_);
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t value =
            integer_of(PyList_GET_ITEM(tokens.ptr(), static_cast<Py_ssize_t>(i)));
        out[i] = static_cast<To>(value);
        if (!std::in_range<To>(value)) [[unlikely]] {
          refuse<To>(std::to_string(value));
        }
      }
      used_ += count * sizeof(To);
    }
  }

  // Of an int and nothing else: the __index__ of another type may run any code, also some that uses
  // this buffer.
  static std::int64_t integer_of(PyObject* item) {
#if PY_VERSION_HEX >= 0x030c0000
    if (PyLong_CheckExact(item) &&
        PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(item))) {
      return PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(item));
    }
#else
    // An int of one digit (below 2**30) holds it in plain sight; a call takes five times longer.
    if (PyLong_CheckExact(item) && static_cast<std::size_t>(Py_SIZE(item) + 1) <= 2) {
      return Py_SIZE(item) *
             static_cast<std::int64_t>(reinterpret_cast<PyLongObject*>(item)->ob_digit[0]);
    }
#endif
    if (!PyLong_CheckExact(item)) {
      throw std::invalid_argument("tokens hold something that is no int");
    }
    const std::int64_t value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    return value;
  }

  template <class From>
  void append_values(std::span<const From> values) {
    std::visit([&]<class To>(To) { append_as<To>(values); }, kind_);
  }

  template <class To, class From>
  void append_as(std::span<const From> values) {
    if constexpr (std::is_integral_v<To>) {
      const std::size_t size = values.size() * sizeof(To);
      make_room(size);
      const std::size_t place =
          narrow(values, reinterpret_cast<To*>(bytes_.data.get() + used_));
      if (place < values.size()) {
        refuse<To>(std::to_string(values[place]));
      }
      used_ += size;
    }
  }

  void make_room(std::size_t size) {
    if (bytes_.size - used_ >= size) {
      return;
    }
    auto larger = allocate<std::uint8_t>(std::max(2 * bytes_.size, used_ + size));
    if (used_ > 0) {  // else there may be no memory to copy from
      std::memcpy(larger.data.get(), bytes_.data.get(), used_);
    }
    bytes_ = std::move(larger);
  }

  std::string dtype_;
  Kind kind_;
  bool has_modes_;
  std::size_t capacity_;
  Buffer<std::uint8_t> bytes_;
  std::size_t used_ = 0;  // a multiple of the token's width, so that tokens stay aligned
  std::vector<std::int32_t> lengths_;
  std::vector<std::int8_t> modes_;
  std::vector<std::int64_t> document_ends_;
  std::int64_t num_loose_ = 0;  // tokens that belong to no sequence yet
  bool has_open_document_ = false;
  WriteBehind writer_;
};

// The sequences of a mapped token file as views of its one array of tokens.
class PySequenceViews {
 public:
  PySequenceViews(const nb::object& tokens, const In<std::int64_t>& sequence_pointers,
                  const In<std::int32_t>& sequence_lengths)
      : array_(tokens), pointers_(sequence_pointers), lengths_(sequence_lengths) {
    if (!PyArray_Check(tokens.ptr()) || pointers_.shape(0) != lengths_.shape(0)) {
      throw std::invalid_argument("an array of tokens, and as many pointers as lengths are needed");
    }
    auto* base = reinterpret_cast<PyArrayObject*>(tokens.ptr());
    if (PyArray_NDIM(base) != 1 || !PyArray_IS_C_CONTIGUOUS(base)) {
      throw std::invalid_argument("tokens must be one contiguous run");
    }
    num_bytes_ = static_cast<std::int64_t>(PyArray_NBYTES(base));
    width_ = static_cast<std::int64_t>(PyArray_ITEMSIZE(base));
  }

  nb::object one(const nb::object& index) const {
    if (!PyIndex_Check(index.ptr())) {
      throw nb::type_error("a sequence's number is an integer");
    }
    const auto size = static_cast<std::int64_t>(lengths_.shape(0));
    std::int64_t number = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
    if (number == -1 && PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    number += number < 0 ? size : 0;
    if (number < 0 || number >= size) {
      throw nb::index_error(
          ("there is no such sequence; the dataset has 0 to " + std::to_string(size - 1)).c_str());
    }
    return view(static_cast<std::size_t>(number));
  }

  // The sequences start, start + step, ... before stop (after it, for a negative step). A slice's
  // step may be any int; one beyond 64 bits leads as far as the largest.
  nb::list many(std::int64_t start, std::int64_t stop, const nb::int_& any_step) const {
    const std::int64_t step = PyNumber_AsSsize_t(any_step.ptr(), nullptr);
    const auto size = static_cast<std::int64_t>(lengths_.shape(0));
    nb::list views;
    std::int64_t number = start;
    while (step > 0 ? number < stop : number > stop) {
      if (number < 0 || number >= size) {
        throw nb::index_error("the slice has not been cut to the dataset");
      }
      views.append(view(static_cast<std::size_t>(number)));
      if (__builtin_add_overflow(number, step, &number)) {
        break;  // such a step leads out of any slice
      }
    }
    return views;
  }

 private:
  nb::object view(std::size_t number) const {
    const std::int64_t pointer = column_of(pointers_)[number];
    npy_intp length = column_of(lengths_)[number];
    if (length < 0 || pointer < 0 || pointer % width_ != 0 ||
        pointer > num_bytes_ - length * width_) {
      throw std::invalid_argument("sequence " + std::to_string(number) +
                                  " lies outside the token file or off its grid");
    }
    auto* base = reinterpret_cast<PyArrayObject*>(array_.ptr());
    PyArray_Descr* dtype = PyArray_DESCR(base);
    Py_INCREF(dtype);  // the new array takes a reference to it, and one to its base
    PyObject* made = PyArray_NewFromDescr(&PyArray_Type, dtype, 1, &length, nullptr,
                                          PyArray_BYTES(base) + pointer, 0, nullptr);
    if (made == nullptr) {
      throw nb::python_error();
    }
    nb::object result = nb::steal(made);
    Py_INCREF(base);
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(made),
                              reinterpret_cast<PyObject*>(base)) < 0) {
      throw nb::python_error();
    }
    return result;
  }

  nb::object array_;
  In<std::int64_t> pointers_;
  In<std::int32_t> lengths_;
  std::int64_t num_bytes_ = 0;
  std::int64_t width_ = 1;
};

// ---- samples ----

Tokens tokens_of(const AnyArray& array) {
  const void* data = array.data();
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<std::uint8_t>()) return static_cast<const std::uint8_t*>(data);
  if (dtype == nb::dtype<std::int8_t>()) return static_cast<const std::int8_t*>(data);
  if (dtype == nb::dtype<std::int16_t>()) return static_cast<const std::int16_t*>(data);
  if (dtype == nb::dtype<std::uint16_t>()) return static_cast<const std::uint16_t*>(data);
  if (dtype == nb::dtype<std::int32_t>()) return static_cast<const std::int32_t*>(data);
  if (dtype == nb::dtype<std::int64_t>()) return static_cast<const std::int64_t*>(data);
  throw std::invalid_argument("tokens must be of an integer dtype");
}

// Spans over one dataset's arrays, and the references that keep them alive.
class PySource {
 public:
  PySource(const AnyArray& tokens, const In<std::int64_t>& sequence_pointers,
           const In<std::int32_t>& sequence_lengths, const In<std::int32_t>& document_index,
           const AnyArray& sample_index, const AnyArray& shuffle_index, std::int64_t num_bytes)
      : kept_(tokens, sequence_pointers, sequence_lengths, document_index, sample_index,
              shuffle_index),
        source_{tokens_of(tokens),
                num_bytes,
                column_of(sequence_pointers),
                column_of(sequence_lengths),
                column_of(document_index),
                {},
                {}} {
    // A damaged file may end in a part of a token, which the array of tokens leaves out.
    is_mapped_ = num_bytes - static_cast<std::int64_t>(tokens.nbytes()) <
                 static_cast<std::int64_t>(tokens.itemsize());
    if (sequence_pointers.shape(0) != sequence_lengths.shape(0)) {
      throw std::invalid_argument("sequence_pointers and sequence_lengths differ in size");
    }
    if (sample_index.dtype() == nb::dtype<std::int32_t>()) {
      source_.sample_index = flat<std::int32_t>(sample_index);
    } else if (sample_index.dtype() == nb::dtype<std::int64_t>()) {
      source_.sample_index = flat<std::int64_t>(sample_index);
    } else {
      throw std::invalid_argument("sample_index must be int32 or int64");
    }
    if (shuffle_index.dtype() == nb::dtype<std::uint32_t>()) {
      source_.shuffle_index = flat<std::uint32_t>(shuffle_index);
    } else if (shuffle_index.dtype() == nb::dtype<std::int64_t>()) {
      source_.shuffle_index = flat<std::int64_t>(shuffle_index);
    } else {
      throw std::invalid_argument("shuffle_index must be uint32 or int64");
    }
  }

  const SampleSource& source() const noexcept { return source_; }
  bool is_mapped() const noexcept { return is_mapped_; }

 private:
  template <class T>
  static Column<T> flat(const AnyArray& array) {
    return {array.data(), array.size()};
  }

  std::tuple<AnyArray, In<std::int64_t>, In<std::int32_t>, In<std::int32_t>, AnyArray, AnyArray>
      kept_;
  SampleSource source_;
  bool is_mapped_ = false;
};

// Four arrays of one row for each sample, in one allocation. As four, glibc gives the end of its
// heap back to the kernel with every batch that is freed, and the next batch faults all its pages in
// again: half of the time of a batch.
class Rows {
 public:
  Rows(std::size_t num_rows, std::int64_t sequence_length)
      : num_rows_(num_rows),
        length_(static_cast<std::size_t>(sequence_length)),
        memory_(allocate<std::int64_t>(3 * size() + (size() + 1) / 2)) {}

  SampleRow first() noexcept {
    std::int64_t* tokens = memory_.data.get();
    return {tokens, tokens + size(), reinterpret_cast<float*>(tokens + 3 * size()),
            tokens + 2 * size()};
  }

  auto take() {
    const SampleRow row = first();
    nb::capsule owner(memory_.data.release(),
                      [](void* pointer) noexcept { FreeMemory{}(pointer); });
    const std::initializer_list<std::size_t> shape{num_rows_, length_};
    return std::tuple(Out<std::int64_t>(row.tokens, shape, owner),
                      Out<std::int64_t>(row.labels, shape, owner),
                      Out<float>(row.loss_mask, shape, owner),
                      Out<std::int64_t>(row.position_ids, shape, owner));
  }

 private:
  std::size_t size() const noexcept { return num_rows_ * length_; }

  std::size_t num_rows_;
  std::size_t length_;
  Buffer<std::int64_t> memory_;
};

using Samples = std::tuple<Out<std::int64_t>, Out<std::int64_t>, Out<float>, Out<std::int64_t>>;

Samples py_gather_samples(const nb::tuple& sources, const In<std::int64_t>& source_numbers,
                          const In<std::int64_t>& sample_numbers, std::int64_t sequence_length,
                          bool add_extra_token, std::optional<std::int64_t> pad_token,
                          std::optional<std::int64_t> eod_token, bool reset_position_ids, bool eod_mask_loss) {
  const std::size_t num_samples = sample_numbers.shape(0);
  if (source_numbers.shape(0) != num_samples) {
    throw std::invalid_argument("source_numbers and sample_numbers differ in size");
  }
  std::vector<const SampleSource*> chosen;
  chosen.reserve(num_samples);
  for (std::size_t i = 0; i < num_samples; ++i) {
    const std::int64_t number = column_of(source_numbers)[i];
    if (number < 0 || static_cast<std::size_t>(number) >= sources.size()) {
      throw std::invalid_argument("source number " + std::to_string(number) + " is outside [0, " +
                                  std::to_string(sources.size()) + ")");
    }
    const auto& source = nb::cast<const PySource&>(sources[static_cast<std::size_t>(number)]);
    if (!source.is_mapped()) {
      throw std::invalid_argument("source " + std::to_string(number) + " is not mapped");
    }
    chosen.push_back(&source.source());
  }
  const SampleOptions options{sequence_length, add_extra_token,    pad_token,
                              eod_token,       reset_position_ids, eod_mask_loss};
  Rows rows(num_samples, sequence_length);
  {
    nb::gil_scoped_release unlocked;
    GatherSpace space;
    read_mapped([&] {
      gather_samples(chosen, column_of(sample_numbers), options, rows.first(), space);
    });
  }
  return rows.take();
}

// From which dataset, and as which of its samples, a blend draws some of its own.
std::tuple<Out<std::int16_t>, Out<std::int64_t>> py_look_up_draws(
    const In<std::int16_t>& dataset_index, const In<std::int64_t>& dataset_sample_index,
    const In<std::int64_t>& numbers) {
  const auto size = static_cast<std::int64_t>(dataset_index.shape(0));
  if (dataset_sample_index.shape(0) != dataset_index.shape(0)) {
    throw std::invalid_argument("dataset_index and dataset_sample_index differ in size");
  }
  auto datasets = allocate<std::int16_t>(numbers.shape(0));
  auto samples = allocate<std::int64_t>(numbers.shape(0));
  read_mapped([&] {
    for (std::size_t i = 0; i < numbers.shape(0); ++i) {
      if (numbers(i) < 0 || numbers(i) >= size) {
        throw std::out_of_range("there is no sample " + std::to_string(numbers(i)) +
                                "; the blend has 0 to " + std::to_string(size - 1));
      }
      const auto place = static_cast<std::size_t>(numbers(i));
      datasets.span()[i] = column_of(dataset_index)[place];
      samples.span()[i] = column_of(dataset_sample_index)[place];
    }
  });
  return {to_numpy(std::move(datasets)), to_numpy(std::move(samples))};
}

// For token files that are not mapped: which bytes the samples take, and where each sample's pieces
// end.
std::tuple<Out<std::int64_t>, Out<std::int64_t>, Out<std::int64_t>> py_find_pieces(
    const PySource& source, const In<std::int64_t>& sample_numbers, std::int64_t sequence_length,
    bool add_extra_token) {
  const SampleOptions options{sequence_length, add_extra_token, std::nullopt, std::nullopt, false, false};
  const std::size_t num_samples = sample_numbers.shape(0);
  auto bounds = allocate<std::int64_t>(num_samples + 1);
  Buffer<std::int64_t> offsets;
  Buffer<std::int64_t> counts;
  {
    nb::gil_scoped_release unlocked;
    std::vector<Piece> pieces;
    bounds.span()[0] = 0;
    for (std::size_t i = 0; i < num_samples; ++i) {
      read_mapped([&] {
        find_pieces(source.source(), column_of(sample_numbers)[i], options, pieces);
      });
      bounds.span()[i + 1] = static_cast<std::int64_t>(pieces.size());
    }
    offsets = allocate<std::int64_t>(pieces.size());
    counts = allocate<std::int64_t>(pieces.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      offsets.span()[i] = pieces[i].offset;
      counts.span()[i] = pieces[i].count;
    }
  }
  return {to_numpy(std::move(offsets)), to_numpy(std::move(counts)), to_numpy(std::move(bounds))};
}

// Rows from tokens that lie one after the other; row i has the tokens up to ends[i], from where the
// row before it ends.
Samples py_fill_rows(const AnyArray& tokens, const In<std::int64_t>& ends,
                     std::int64_t sequence_length, bool add_extra_token,
                     std::optional<std::int64_t> pad_token,
                     std::optional<std::int64_t> eod_token, bool reset_position_ids, bool eod_mask_loss) {
  const SampleOptions options{sequence_length, add_extra_token,    pad_token,
                              eod_token,       reset_position_ids, eod_mask_loss};
  const Tokens kind = tokens_of(tokens);
  const auto width = static_cast<std::int64_t>(tokens.itemsize());
  const auto* bytes = static_cast<const unsigned char*>(tokens.data());
  const std::int64_t capacity = sequence_length + (add_extra_token ? 1 : 0);
  Rows rows(ends.shape(0), sequence_length);
  {
    nb::gil_scoped_release unlocked;
    SampleRow row = rows.first();
    std::int64_t start = 0;
    for (std::size_t i = 0; i < ends.shape(0); ++i) {
      const std::int64_t end = column_of(ends)[i];
      if (end < start || end - start > capacity ||
          end > static_cast<std::int64_t>(tokens.size())) {
        throw std::invalid_argument("a row from token " + std::to_string(start) + " to " +
                                    std::to_string(end) + " does not fit");
      }
      const Run run{bytes + start * width, (end - start) * width};
      fill_row(kind, std::span(&run, end > start ? 1 : 0), {}, options, row);
      row = {row.tokens + sequence_length, row.labels + sequence_length,
             row.loss_mask + sequence_length, row.position_ids + sequence_length};
      start = end;
    }
  }
  return rows.take();
}

}  // namespace
}  // namespace millrace

NB_MODULE(_core, module) {
  using namespace millrace;
  using namespace nb::literals;

  if (_import_array() < 0) {
    throw nb::python_error();
  }
  // What nanobind takes for a leak at the end of Python is alive by right: a DataLoader's worker, or
  // any daemon thread, holds its dataset until the process is gone, plain Python objects included.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    } catch (const LostPage& error) {
      PyErr_SetString(nb::module_::import_("millrace.errors").attr("DataError").ptr(),
                      error.what());
    }
  });

  module.def("shuffled_int32", &py_shuffled<std::int32_t>, "values"_a, "key"_a, "position"_a);
  module.def("shuffled_uint32", &py_shuffled<std::uint32_t>, "values"_a, "key"_a, "position"_a);
  module.def("shuffled_int64", &py_shuffled<std::int64_t>, "values"_a, "key"_a, "position"_a);
  module.def("shuffled_ranges_int32", &py_shuffled_ranges<std::int32_t>, "ranges"_a, "key"_a,
             "position"_a);
  module.def("shuffled_ranges_uint32", &py_shuffled_ranges<std::uint32_t>, "ranges"_a, "key"_a,
             "position"_a);
  module.def("shuffled_ranges_int64", &py_shuffled_ranges<std::int64_t>, "ranges"_a, "key"_a,
             "position"_a);
  module.def("draw_targets", &py_draw_targets, "first"_a, "count"_a, "key"_a, "position"_a);

  module.def("sample_index_int32", &py_sample_index<std::int32_t>, "sequence_lengths"_a,
             "document_index"_a, "sequence_length"_a, "num_samples"_a, "add_extra_token"_a,
             "allow_partial"_a);
  module.def("sample_index_int64", &py_sample_index<std::int64_t>, "sequence_lengths"_a,
             "document_index"_a, "sequence_length"_a, "num_samples"_a, "add_extra_token"_a,
             "allow_partial"_a);

  module.def("blend_by_weights", &py_blend_by_weights, "weights"_a, "size"_a, "threads"_a);
  module.def("blend_by_sizes", &py_blend_by_sizes, "sizes"_a, "total"_a, "threads"_a);

  module.def("copy_pieces", &py_copy_pieces, "bytes"_a, "byte_offsets"_a, "byte_counts"_a);
  module.def("read_pieces", &py_read_pieces, "descriptor"_a, "num_bytes"_a, "byte_offsets"_a,
             "byte_counts"_a);
  module.def("copy_sequences", &py_copy_sequences, "bytes"_a, "pointers"_a, "lengths"_a, "ids"_a,
             "token_size"_a);
  module.def("first_bad_sequence", &py_first_bad_sequence, "lengths"_a, "pointers"_a,
             "token_size"_a, "byte_offset"_a);
  module.def("first_bad_document", &py_first_bad_document, "entries"_a, "num_sequences"_a);
  module.def("map_file", &py_map_file, "descriptor"_a, "size"_a);
  module.def("start_writeback", &py_start_writeback, "file"_a, "start"_a, "size"_a);
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
      .def_prop_ro("has_open_document", &PyTokenBuffer::has_open_document)
      .def_prop_ro("num_bytes", &PyTokenBuffer::num_bytes)
      .def_ro("num_tokens", &PyTokenBuffer::num_tokens_)
      .def_ro("num_sequences", &PyTokenBuffer::num_sequences_)
      .def_ro("num_documents", &PyTokenBuffer::num_documents_)
      .def_rw("is_busy", &PyTokenBuffer::is_busy_);

  nb::class_<PySequenceViews>(module, "SequenceViews")
      .def(nb::init<const nb::object&, const In<std::int64_t>&, const In<std::int32_t>&>(),
           "tokens"_a, "sequence_pointers"_a, "sequence_lengths"_a)
      .def("one", &PySequenceViews::one, "index"_a)
      .def("many", &PySequenceViews::many, "start"_a, "stop"_a, "step"_a);

  nb::class_<PySource>(module, "SampleSource")
      .def(nb::init<const AnyArray&, const In<std::int64_t>&, const In<std::int32_t>&,
                    const In<std::int32_t>&, const AnyArray&, const AnyArray&, std::int64_t>(),
           "tokens"_a, "sequence_pointers"_a, "sequence_lengths"_a, "document_index"_a,
           "sample_index"_a, "shuffle_index"_a, "num_bytes"_a);
  module.def("look_up_draws", &py_look_up_draws, "dataset_index"_a, "dataset_sample_index"_a,
             "sample_numbers"_a);
  module.def("find_pieces", &py_find_pieces, "source"_a, "sample_numbers"_a, "sequence_length"_a,
             "add_extra_token"_a);
  module.def("fill_rows", &py_fill_rows, "tokens"_a, "ends"_a, "sequence_length"_a,
             "add_extra_token"_a, "pad_token"_a.none(), "eod_token"_a.none(), "reset_position_ids"_a,
             "eod_mask_loss"_a);
  module.def("gather_samples", &py_gather_samples, "sources"_a, "source_numbers"_a,
             "sample_numbers"_a, "sequence_length"_a, "add_extra_token"_a, "pad_token"_a.none(),
             "eod_token"_a.none(), "reset_position_ids"_a, "eod_mask_loss"_a);
}
