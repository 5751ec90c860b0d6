// Pieces of an open file, each to its own place in memory.
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// Piece i is sizes[i] bytes from byte offsets[i] of a file on; it goes to byte targets[i] of a buffer.
struct FilePieces {
  Column<std::int64_t> offsets;
  Column<std::int64_t> sizes;
  Column<std::int64_t> targets;
};

// Reads the pieces in the order of their offsets, neighbours in one preadv. Where targets overlap, any
// of their pieces may win. Throws std::invalid_argument for a piece outside the buffer, before anything
// is read, and where the file ends early; std::system_error where reading fails.
//
// With `or_words`, sizes are multiples of 4, and the result is the bitwise OR of all 32-bit words that
// were read; otherwise 0.
std::uint32_t read_pieces(int descriptor, const FilePieces& pieces, std::span<std::uint8_t> buffer,
                          bool or_words = false);

}  // namespace millrace
