// Token sources as Python holds them.
#pragma once

#include "arrays.hpp"
#include "tokens.hpp"

namespace millrace {

inline Tokens tokens_of(const AnyArray& array) {
  const void* data = array.data();
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<std::uint8_t>()) return static_cast<const std::uint8_t*>(data);
  if (dtype == nb::dtype<std::int8_t>()) return static_cast<const std::int8_t*>(data);
  if (dtype == nb::dtype<std::int16_t>()) return static_cast<const std::int16_t*>(data);
  if (dtype == nb::dtype<std::uint16_t>()) return static_cast<const std::uint16_t*>(data);
  if (dtype == nb::dtype<std::int32_t>()) return static_cast<const std::int32_t*>(data);
  if (dtype == nb::dtype<std::int64_t>()) return static_cast<const std::int64_t*>(data);
  throw std::invalid_argument("tokens must be of an integer dtype");
}

// A token source over arrays, and the references that keep them alive.
class PyTokenSource : public TokenSource {
 public:
  PyTokenSource(const AnyArray& tokens, const In<std::int64_t>& sequence_pointers,
                const In<std::int32_t>& sequence_lengths, std::int64_t num_bytes)
      : TokenSource(tokens_of(tokens), static_cast<std::int64_t>(tokens.size()), num_bytes,
                    column_of(sequence_pointers), column_of(sequence_lengths)),
        arrays_(tokens, sequence_pointers, sequence_lengths) {}

 private:
  std::tuple<AnyArray, In<std::int64_t>, In<std::int32_t>> arrays_;
};

}  // namespace millrace
