// Numbers that may lie at any byte: the columns of a mapped index file start at byte 34, and arrays
// of callers may start anywhere. Each is loaded by memcpy, which compiles to a plain load.
#pragma once

#include <cstddef>
#include <cstring>

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

  // Where a number lies, to ask for it ahead.
  const unsigned char* at(std::size_t place) const noexcept { return bytes_ + place * sizeof(T); }

  std::size_t size() const noexcept { return size_; }

 private:
  const unsigned char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace millrace
