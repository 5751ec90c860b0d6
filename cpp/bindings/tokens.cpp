// Token files and their index files: pieces, sequences, checks, and mapped files.
#include <memory>

#include "arrays.hpp"
#include "mapping.hpp"
#include "ragged.hpp"
#include "read_pieces.hpp"
#include "write_behind.hpp"

namespace millrace {
namespace {

std::vector<Piece> pieces_from(const In<std::int64_t>& offsets, const In<std::int64_t>& counts) {
  if (offsets.shape(0) != counts.shape(0)) {
    fail("byte_offsets and byte_counts differ in size");
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

Out<std::uint8_t> py_read_packed(int descriptor, std::int64_t num_bytes,
                                 const In<std::int64_t>& offsets,
                                 const In<std::int64_t>& counts) {
  Buffer<std::uint8_t> out;
  {
    nb::gil_scoped_release unlocked;
    const std::vector<Piece> pieces = pieces_from(offsets, counts);
    out = allocate<std::uint8_t>(static_cast<std::size_t>(total_size(pieces, num_bytes)));
    std::vector<std::int64_t> targets(pieces.size());
    std::int64_t target = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      targets[i] = target;
      target += pieces[i].count;
    }
    read_pieces(descriptor,
                {column_of(offsets), column_of(counts), {targets.data(), targets.size()}},
                out.span());
  }
  return to_numpy(std::move(out));
}

// Fills the caller's buffer, which may be memory that several processes share.
std::uint32_t py_read_pieces(
    int descriptor, const In<std::int64_t>& offsets, const In<std::int64_t>& sizes,
    const nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& buffer,
    const In<std::int64_t>& targets, bool or_words) {
  nb::gil_scoped_release unlocked;
  return read_pieces(descriptor, {column_of(offsets), column_of(sizes), column_of(targets)},
                     {buffer.data(), buffer.shape(0)}, or_words);
}

void py_prefetch_mapped(const In<std::uint8_t>& bytes, const In<std::int64_t>& offsets,
                        const In<std::int64_t>& counts) {
  nb::gil_scoped_release unlocked;
  const std::vector<Piece> pieces = pieces_from(offsets, counts);
  (void)total_size(pieces, static_cast<std::int64_t>(bytes.shape(0)));
  prefetch_pieces(span_of(bytes), pieces);
}

void py_prefetch_file(int descriptor, std::int64_t num_bytes, const In<std::int64_t>& offsets,
                      const In<std::int64_t>& counts) {
  nb::gil_scoped_release unlocked;
  const std::vector<Piece> pieces = pieces_from(offsets, counts);
  (void)total_size(pieces, num_bytes);
  prefetch_pieces(descriptor, pieces);
}

std::tuple<Out<std::uint8_t>, Out<std::int64_t>> py_copy_sequences(
    const In<std::uint8_t>& bytes, const In<std::int64_t>& pointers,
    const In<std::int32_t>& lengths, const In<std::int64_t>& ids, std::int64_t token_size) {
  if (pointers.shape(0) != lengths.shape(0)) {
    fail("pointers and lengths differ in size");
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
    fail("lengths and pointers differ in size");
  }
  nb::gil_scoped_release unlocked;
  std::int64_t place = 0;
  read_mapped([&] {
    place = first_bad_sequence(column_of(lengths), column_of(pointers), token_size, byte_offset);
  });
  return {place, byte_offset};
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

}  // namespace

void add_tokens(nb::module_& module) {
  module.def("copy_pieces", &py_copy_pieces, "data"_array, "byte_offsets"_array,
             "byte_counts"_array);
  module.def("read_packed", &py_read_packed, "descriptor"_a, "num_bytes"_a, "byte_offsets"_array,
             "byte_counts"_array);
  module.def("read_pieces", &py_read_pieces, "descriptor"_a, "byte_offsets"_array, "sizes"_array,
             "buffer"_array, "targets"_array, "or_words"_a = false);
  module.def("prefetch_mapped", &py_prefetch_mapped, "data"_array, "byte_offsets"_array,
             "byte_counts"_array);
  module.def("prefetch_file", &py_prefetch_file, "descriptor"_a, "num_bytes"_a, "byte_offsets"_array,
             "byte_counts"_array);
  module.def("copy_sequences", &py_copy_sequences, "data"_array, "pointers"_array,
             "lengths"_array, "ids"_array, "token_size"_a);
  module.def("first_bad_sequence", &py_first_bad_sequence, "lengths"_array, "pointers"_array,
             "token_size"_a, "byte_offset"_a);
  module.def("first_bad_document", &py_first_bad_document, "entries"_array, "num_sequences"_a);
  module.def("map_file", &py_map_file, "descriptor"_a, "size"_a);
  module.def("start_writeback", &py_start_writeback, "file"_a, "start"_a, "size"_a);
}

}  // namespace millrace
