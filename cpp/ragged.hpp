// Many pieces of a file at once, and whether the entries of an index file agree with each other.
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// A piece of a file: `count` bytes from `offset` on.
struct Piece {
  std::int64_t offset;
  std::int64_t count;
};

// The pieces' total size. Throws std::invalid_argument for a piece outside [0, num_bytes).
std::int64_t total_size(std::span<const Piece> pieces, std::int64_t num_bytes);

// The bytes of some sequences, and where each starts among their tokens (`offsets`, one more than
// ids). Negative ids count from the end. Throws std::out_of_range for an id outside the dataset, and
// std::invalid_argument for a sequence with a negative length.
void locate_sequences(Column<std::int64_t> pointers, Column<std::int32_t> lengths,
                      Column<std::int64_t> ids, std::int64_t token_size,
                      std::span<Piece> pieces, std::span<std::int64_t> offsets);

// Copies the pieces of `bytes` into one run. They have been checked.
void copy_pieces(std::span<const std::uint8_t> bytes, std::span<const Piece> pieces,
                 std::span<std::uint8_t> out);

// Starts to read the pieces of a mapped file, or of an open one, into memory, and does not wait for
// them. They have been checked.
void prefetch_pieces(std::span<const std::uint8_t> bytes, std::span<const Piece> pieces) noexcept;
void prefetch_pieces(int descriptor, std::span<const Piece> pieces) noexcept;

// The place of the first sequence that has a negative length or does not start where the ones
// before it end, or the number of sequences if there is none. `byte_offset` is where the first one
// must start; afterwards, where the next one after the last must.
std::int64_t first_bad_sequence(Column<std::int32_t> lengths,
                                Column<std::int64_t> pointers, std::int64_t token_size,
                                std::int64_t& byte_offset);

// The place of the first document entry that is smaller than the one before it or outside
// [0, num_sequences], or the number of entries if there is none.
std::int64_t first_bad_document(Column<std::int64_t> entries, std::int64_t num_sequences);

}  // namespace millrace
