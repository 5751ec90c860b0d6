// Exact twins of NumPy's legacy RandomState.shuffle for one-dimensional arrays, and of torch.randperm
// on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "mt19937.hpp"

namespace millrace {

// A run of consecutive numbers, `copies` times over.
struct Range {
  std::int64_t start;
  std::int64_t stop;
  std::int64_t copies;

  std::int64_t size() const noexcept { return (stop - start) * copies; }
};

// The swap targets of the shuffle's steps first, first - 1, ... (targets.size() of them, each step
// above 0): target k is uniform in [0, first - k], by masked rejection.
void draw_targets(std::int64_t first, std::span<std::int64_t> targets, Mt19937& random);

// Writes each range's numbers, one range after the other, and shuffles each range alone.
// The caller has checked that the numbers fit T and that `values` has the ranges' total size.
template <class T>
void shuffle_ranges(std::span<const Range> ranges, std::span<T> values, Mt19937& random);

// Writes a permutation of 0 ... values.size() - 1; every number must fit T.
//
// torch has two rules. Below 2^32 / 20 numbers, one 32-bit word is drawn for each step: for
// i = 0, 1, ..., n - 2, swap values[i] with values[i + word % (n - i)]. From there on, two words
// are: for i = 0, 1, ..., n - 1, number i takes the place j = words % (i + 1), and the number that
// was there moves to place i.
template <class T>
void randperm(std::span<T> values, bool has_64_bit_draws, Mt19937& random);

}  // namespace millrace
