// The walk that cuts shuffled documents into samples.
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// Row k of the sample index says where sample k starts: (place in the document index, token offset
// in that document); rows k and k + 1 bound sample k. Documents are read in the order of
// `document_index`, whose entries are places in `sequence_lengths`.
//
// Seen over all the tokens in a row, sample k starts at token k * sequence_length. Its row names
// the document that holds the last token which sample k - 1 draws: with the extra token
// (`extra_tokens` = 1) that is the start token itself; without it, the token before, so that an
// offset may equal its document's length. Row 0 is always (0, 0).
//
// `rows` holds 2 * (num_samples + 1) numbers. Where the tokens do not suffice, the last sample may
// be partial (`allow_partial`): its end is the end of the last document.
//
// Throws std::invalid_argument for an entry of the document index outside `sequence_lengths`, a
// negative length, or too few tokens.
template <class T>
void walk_samples(Column<std::int32_t> sequence_lengths,
                  Column<std::int32_t> document_index, std::int64_t sequence_length,
                  std::int64_t extra_tokens, bool allow_partial, std::span<T> rows);

}  // namespace millrace
