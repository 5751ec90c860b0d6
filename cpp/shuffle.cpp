#include "shuffle.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

namespace millrace {
namespace {

// Targets are drawn this many at a time, each prefetched as it is drawn, then swapped in order.
// 512 lines of 64 bytes fit the first-level cache, and are more than a core can have in flight.
constexpr std::size_t block_size = 512;

constexpr std::int64_t max_32_bit_step = 0xffffffffLL;

std::uint64_t mask_of(std::int64_t step) noexcept {
  return ~std::uint64_t{0} >> std::countl_zero(static_cast<std::uint64_t>(step));
}

// Draws targets for the steps first, first - 1, ... while they share one mask, at most `limit`.
// Without a branch on acceptance: up to half of the draws are refused, at random, and each
// mispredicted branch would cost more than the draw. Returns how many were drawn.
template <class Index, class Touch>
std::size_t draw_block(std::int64_t first, std::size_t limit, Index* targets, Mt19937& random,
                       Touch touch) {
  const std::uint64_t mask = mask_of(first);
  const auto same_mask = static_cast<std::size_t>(first - static_cast<std::int64_t>(mask >> 1));
  const std::size_t num_targets = std::min(limit, same_mask);
  std::size_t count = 0;
  if (first > max_32_bit_step) {
    while (count < num_targets) {
      const std::uint64_t target = random.next64() & mask;
      if (target <= static_cast<std::uint64_t>(first) - count) {
        targets[count] = static_cast<Index>(target);
        touch(targets[count]);
        ++count;
      }
    }
    return count;
  }
  const auto mask32 = static_cast<std::uint32_t>(mask);
  auto step = static_cast<std::uint32_t>(first);
  while (count < num_targets) {
    const std::uint32_t* words = random.block();
    const int available = random.block_size();
    int used = 0;
    for (; used < available && count < num_targets; ++used) {
      const std::uint32_t target = words[used] & mask32;
      targets[count] = static_cast<Index>(target);
      touch(targets[count]);
      const std::uint32_t accepted = target <= step ? 1 : 0;
      count += accepted;
      step -= accepted;
    }
    random.skip(used);
  }
  return count;
}

// Fisher-Yates from the end: for i = n - 1 ... 1, swap values[i] with values[j], j in [0, i].
template <class T>
void shuffle(std::span<T> values, Mt19937& random) {
  std::array<std::int64_t, block_size + 1> targets;
  T* data = values.data();
  auto step = static_cast<std::int64_t>(values.size()) - 1;
  while (step > 0) {
    const std::size_t count =
        draw_block(step, block_size, targets.data(), random,
                   [data](std::int64_t target) { __builtin_prefetch(data + target, 1); });
    for (std::size_t k = 0; k < count; ++k, --step) {
      std::swap(data[step], data[targets[k]]);
    }
  }
}

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

void draw_targets(std::int64_t first, std::span<std::int64_t> targets, Mt19937& random) {
  // One spare place: a draw is written before it is known whether it is accepted.
  std::array<std::int64_t, block_size + 1> block;
  for (std::size_t done = 0; done < targets.size();) {
    const std::size_t limit = std::min(block_size, targets.size() - done);
    const std::size_t count = draw_block(first - static_cast<std::int64_t>(done), limit,
                                         block.data(), random, [](std::int64_t) {});
    std::copy_n(block.begin(), count, targets.begin() + static_cast<std::ptrdiff_t>(done));
    done += count;
  }
}

template <class T>
void shuffle_ranges(std::span<const Range> ranges, std::span<T> values, Mt19937& random) {
  T* out = values.data();
  for (const Range& range : ranges) {
    const auto run = static_cast<std::size_t>(range.stop - range.start);
    T* begin = out;
    for (std::int64_t copy = 0; copy < range.copies; ++copy, out += run) {
      // Not std::iota: it would step past the last number, which may be the largest of T.
      for (std::size_t i = 0; i < run; ++i) {
        out[i] = static_cast<T>(range.start + static_cast<std::int64_t>(i));
      }
    }
    shuffle(std::span<T>(begin, out), random);
  }
}

template void shuffle_ranges(std::span<const Range>, std::span<std::int32_t>, Mt19937&);
template void shuffle_ranges(std::span<const Range>, std::span<std::uint32_t>, Mt19937&);
template void shuffle_ranges(std::span<const Range>, std::span<std::int64_t>, Mt19937&);

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
