#include "check_index.hpp"

namespace millrace {

std::int64_t first_bad_sequence(std::span<const std::int32_t> lengths,
                                std::span<const std::int64_t> pointers, std::int64_t token_size,
                                std::int64_t& byte_offset) {
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || pointers[i] != byte_offset) {
      return static_cast<std::int64_t>(i);
    }
    // In unsigned numbers: a damaged index must not overflow.
    byte_offset = static_cast<std::int64_t>(static_cast<std::uint64_t>(byte_offset) +
                                            static_cast<std::uint64_t>(lengths[i] * token_size));
  }
  return static_cast<std::int64_t>(lengths.size());
}

std::int64_t first_bad_document(std::span<const std::int64_t> entries, std::int64_t num_sequences) {
  std::int64_t previous = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i] < previous || entries[i] > num_sequences) {
      return static_cast<std::int64_t>(i);
    }
    previous = entries[i];
  }
  return static_cast<std::int64_t>(entries.size());
}

}  // namespace millrace
