#include "check_index.hpp"

namespace millrace {

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
