#include "ragged.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

// Bytes of a piece that are prefetched: most pieces whole; the hardware stops at each page.
constexpr std::int64_t max_prefetched_bytes = 2048;

// Pieces that are prefetched together where the data are cold.
constexpr std::size_t block_size = 1024;

void prefetch_cold(std::span<const std::uint8_t> bytes, std::span<const Piece> pieces) {
  if (pieces.size() > 1 && pieces[0].count > 0 && is_cold(bytes.data() + pieces[0].offset)) {
    prefetch_pieces(bytes, pieces.subspan(1));
  }
}

}  // namespace

std::int64_t total_size(std::span<const Piece> pieces, std::int64_t num_bytes) {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.offset < 0 || piece.count < 0 || piece.offset > num_bytes - piece.count) {
      fail("piece ", i, " has ", piece.count, " bytes from byte ", piece.offset,
           " on, outside the file of ", num_bytes);
    }
    if (__builtin_add_overflow(total, piece.count, &total)) {
      fail("the pieces' total size does not fit 64 bits");
    }
  }
  return total;
}

void locate_sequences(Column<std::int64_t> pointers, Column<std::int32_t> lengths,
                      Column<std::int64_t> ids, std::int64_t token_size,
                      std::span<Piece> pieces, std::span<std::int64_t> offsets) {
  constexpr std::size_t ahead = 16;  // entries of a large index are a wait for memory each
  const auto size = static_cast<std::int64_t>(lengths.size());
  const auto place_of = [&](std::size_t i) {
    const std::int64_t id = ids[i];
    return id < 0 ? id + size : id;
  };
  offsets[0] = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + ahead < ids.size()) {
      const std::int64_t next = place_of(i + ahead);
      prefetch_entry(lengths, next);
      prefetch_entry(pointers, next);
    }
    const std::int64_t place = place_of(i);
    if (place < 0 || place >= size) {
      fail<std::out_of_range>("there is no sequence ", ids[i], "; the dataset has 0 to ", size - 1);
    }
    const auto sequence = static_cast<std::size_t>(place);
    const std::int64_t length = lengths[sequence];
    if (length < 0) {
      fail("sequence ", place, " has the length ", length, ", which is outside [0, 2147483647]");
    }
    pieces[i] = {pointers[sequence], length * token_size};
    offsets[i + 1] = offsets[i] + length;
  }
}

void copy_pieces(std::span<const std::uint8_t> bytes, std::span<const Piece> pieces,
                 std::span<std::uint8_t> out) {
  std::uint8_t* to = out.data();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i % block_size == 0) {
      prefetch_cold(bytes, pieces.subspan(i, std::min(block_size, pieces.size() - i)));
    }
    if (i + prefetch_distance < pieces.size()) {
      const Piece& ahead = pieces[i + prefetch_distance];
      prefetch_bytes(bytes.data() + ahead.offset, ahead.count, max_prefetched_bytes);
    }
    if (pieces[i].count > 0) {
      std::memcpy(to, bytes.data() + pieces[i].offset, static_cast<std::size_t>(pieces[i].count));
      to += pieces[i].count;
    }
  }
}

void prefetch_pieces(std::span<const std::uint8_t> bytes, std::span<const Piece> pieces) noexcept {
  for (const Piece& piece : pieces) {
    if (piece.count > 0) {
      prefetch_pages(bytes.data() + piece.offset, piece.count);
    }
  }
}

void prefetch_pieces(int descriptor, std::span<const Piece> pieces) noexcept {
  for (const Piece& piece : pieces) {
    if (piece.count > 0) {  // a count of 0 would mean the rest of the file
      prefetch_range(descriptor, piece.offset, piece.count);
    }
  }
}

std::int64_t first_bad_sequence(Column<std::int32_t> lengths,
                                Column<std::int64_t> pointers, std::int64_t token_size,
                                std::int64_t& byte_offset) {
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t length = lengths[i];
    if (length < 0 || pointers[i] != byte_offset) {
      return static_cast<std::int64_t>(i);
    }
    // In unsigned numbers: a damaged index must not overflow.
    byte_offset = static_cast<std::int64_t>(static_cast<std::uint64_t>(byte_offset) +
                                            static_cast<std::uint64_t>(length * token_size));
  }
  return static_cast<std::int64_t>(lengths.size());
}

std::int64_t first_bad_document(Column<std::int64_t> entries, std::int64_t num_sequences) {
  std::int64_t previous = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::int64_t entry = entries[i];
    if (entry < previous || entry > num_sequences) {
      return static_cast<std::int64_t>(i);
    }
    previous = entry;
  }
  return static_cast<std::int64_t>(entries.size());
}

}  // namespace millrace
