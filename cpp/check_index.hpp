// Whether the entries of an index file agree with each other.
#pragma once

#include <cstdint>

#include "column.hpp"

namespace millrace {

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
