// Errors about what only reading the data shows.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace millrace {

template <class Part>
std::string text(const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return part;
  }
}

// Throws std::invalid_argument (ValueError in Python), or another error, with the parts as message.
template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error((text(parts) + ...));
}

// Data that the caller must change, or read in another way: DataError in Python.
class BadData : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The value, which must be in [0, limit).
inline std::int64_t checked(std::int64_t value, std::int64_t limit, const char* name) {
  if (value < 0 || value >= limit) [[unlikely]] {
    fail(name, " is ", value, ", outside [0, ", limit, ")");
  }
  return value;
}

}  // namespace millrace
