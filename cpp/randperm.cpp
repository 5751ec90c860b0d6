#include "randperm.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace millrace {
namespace {

// As in shuffle.cpp: targets are drawn and prefetched this many at a time, then swapped in order.
constexpr std::size_t block_size = 512;

template <class T>
void swap_forwards(std::span<T> values, Mt19937& random) {
  T* data = values.data();
  const std::size_t size = values.size();
  std::iota(values.begin(), values.end(), T{0});
  std::array<std::size_t, block_size> targets;
  for (std::size_t first = 0; first + 1 < size;) {
    const std::size_t count = std::min(block_size, size - 1 - first);
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t step = first + k;
      // A 32-bit division takes a third of the time of a 64-bit one; size is below 2^32 here.
      targets[k] = step + random.next32() % static_cast<std::uint32_t>(size - step);
      __builtin_prefetch(data + targets[k], 1);
    }
    for (std::size_t k = 0; k < count; ++k) {
      std::swap(data[first + k], data[targets[k]]);
    }
    first += count;
  }
}

template <class T>
void insert_anywhere(std::span<T> values, Mt19937& random) {
  T* data = values.data();
  std::array<std::size_t, block_size> targets;
  for (std::size_t first = 0; first < values.size();) {
    const std::size_t count = std::min(block_size, values.size() - first);
    for (std::size_t k = 0; k < count; ++k) {
      targets[k] = random.next64() % (first + k + 1);
      __builtin_prefetch(data + targets[k], 1);
    }
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t step = first + k;
      data[step] = static_cast<T>(step);
      data[step] = data[targets[k]];
      data[targets[k]] = static_cast<T>(step);
    }
    first += count;
  }
}

}  // namespace

template <class T>
void randperm(std::span<T> values, bool has_64_bit_draws, Mt19937& random) {
  if (has_64_bit_draws) {
    insert_anywhere(values, random);
  } else {
    swap_forwards(values, random);
  }
}

template void randperm(std::span<std::uint32_t>, bool, Mt19937&);
template void randperm(std::span<std::int64_t>, bool, Mt19937&);

}  // namespace millrace
