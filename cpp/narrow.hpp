// Token ids into a token file's dtype, checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

namespace millrace {

// Writes `values` as To. Returns the place of the first value that does not fit, or the number of
// values if all do. The fit is gathered over blocks, without a branch for each value, so that the
// loop becomes vector code.
template <class From, class To>
std::size_t narrow(std::span<const From> values, To* out) {
  constexpr std::size_t block_size = 1024;
  for (std::size_t start = 0; start < values.size(); start += block_size) {
    const std::size_t stop = start + block_size < values.size() ? start + block_size : values.size();
    unsigned misfits = 0;
    for (std::size_t i = start; i < stop; ++i) {
      const To narrowed = static_cast<To>(values[i]);
      out[i] = narrowed;
      misfits |= static_cast<unsigned>(static_cast<From>(narrowed) != values[i]) |
                 static_cast<unsigned>((narrowed < To{0}) != (values[i] < From{0}));
    }
    if (misfits != 0) {
      for (std::size_t i = start; i < stop; ++i) {
        if (!std::in_range<To>(values[i])) {
          return i;
        }
      }
    }
  }
  return values.size();
}

}  // namespace millrace
