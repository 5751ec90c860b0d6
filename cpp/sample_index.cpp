#include "sample_index.hpp"

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

// Lengths are read at random (the documents are shuffled): prefetch them this many steps ahead.
constexpr std::size_t lengths_ahead = 32;

std::int64_t length_of(Column<std::int32_t> sequence_lengths, std::int32_t sequence) {
  if (sequence < 0 || static_cast<std::size_t>(sequence) >= sequence_lengths.size()) {
    fail("document_index holds ", sequence, ", but there are ", sequence_lengths.size(),
         " sequences");
  }
  const std::int32_t length = sequence_lengths[static_cast<std::size_t>(sequence)];
  if (length < 0) {
    fail("sequence ", sequence, " has the length ", length, ", which is negative");
  }
  return length;
}

}  // namespace

template <class T>
void walk_samples(Column<std::int32_t> sequence_lengths,
                  Column<std::int32_t> document_index, std::int64_t sequence_length,
                  std::int64_t extra_tokens, bool allow_partial, std::span<T> rows) {
  const std::size_t num_rows = rows.size() / 2;
  rows[0] = 0;
  rows[1] = 0;
  std::size_t row = 1;
  std::int64_t boundary = sequence_length;  // the token at which the row's sample starts
  std::int64_t document_start = 0;
  const std::size_t num_documents = document_index.size();
  for (std::size_t place = 0; place < num_documents && row < num_rows; ++place) {
    if (place + lengths_ahead < num_documents) {
      prefetch_entry(sequence_lengths, document_index[place + lengths_ahead]);
    }
    const std::int64_t document_end =
        document_start + length_of(sequence_lengths, document_index[place]);
    while (boundary + extra_tokens <= document_end && row < num_rows) {
      rows[2 * row] = static_cast<T>(place);
      rows[2 * row + 1] = static_cast<T>(boundary - document_start);
      boundary += sequence_length;
      ++row;
    }
    document_start = document_end;
  }
  if (row == num_rows) {
    return;
  }
  if (!allow_partial || row + 1 < num_rows) {
    fail("the documents hold ", document_start, " tokens, too few for ", num_rows - 1,
         " samples of ", sequence_length);
  }
  // The partial sample ends with the last document; a trailing document without tokens cannot be
  // named with the extra token (its offset would be -1), so the last one with tokens is.
  for (std::size_t place = num_documents; place > 0; --place) {
    const std::int64_t offset =
        length_of(sequence_lengths, document_index[place - 1]) - extra_tokens;
    if (offset >= 0) {
      rows[2 * row] = static_cast<T>(place - 1);
      rows[2 * row + 1] = static_cast<T>(offset);
      return;
    }
  }
  fail("the documents hold no tokens");
}

template void walk_samples(Column<std::int32_t>, Column<std::int32_t>,
                           std::int64_t, std::int64_t, bool, std::span<std::int32_t>);
template void walk_samples(Column<std::int32_t>, Column<std::int32_t>,
                           std::int64_t, std::int64_t, bool, std::span<std::int64_t>);

}  // namespace millrace
