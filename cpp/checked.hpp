// Checks of what only reading the data shows.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace millrace {

// The value; throws std::invalid_argument where it is outside [0, limit).
inline std::int64_t checked(std::int64_t value, std::int64_t limit, const char* name) {
  if (value < 0 || value >= limit) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                ", outside [0, " + std::to_string(limit) + ")");
  }
  return value;
}

}  // namespace millrace
