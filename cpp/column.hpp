// Numbers that may lie at any byte: the columns of a mapped index file start at byte 34, and arrays
// of callers may start anywhere. Each is loaded by memcpy, which compiles to a plain load.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ranges>
#include <span>

#include "errors.hpp"

namespace millrace {

template <class T>
class Column {
 public:
  Column() = default;
  Column(const void* data, std::size_t size) noexcept
      : bytes_(static_cast<const unsigned char*>(data)), size_(size) {}

  T operator[](std::size_t place) const noexcept {
    T value;
    std::memcpy(&value, at(place), sizeof(T));
    return value;
  }

  // Where a number lies, to prefetch it.
  const unsigned char* at(std::size_t place) const noexcept { return bytes_ + place * sizeof(T); }

  std::size_t size() const noexcept { return size_; }

 private:
  const unsigned char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

// The first of `size` places that `is_before` does not hold for; it holds for all before that one.
template <class IsBefore>
std::size_t first_not(std::size_t size, IsBefore is_before) {
  return *std::ranges::partition_point(std::views::iota(std::size_t{0}, size), is_before);
}

// Copies the numbers at some places. Throws std::out_of_range for a place that there is not.
template <class T>
void take(Column<T> column, Column<std::int64_t> places, std::span<T> out) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::int64_t place = places[i];
    if (place < 0 || static_cast<std::size_t>(place) >= column.size()) {
      fail<std::out_of_range>("there is no sample ", place, "; there are ", column.size());
    }
    out[i] = column[static_cast<std::size_t>(place)];
  }
}

}  // namespace millrace
