// An exact twin of torch.randperm on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "mt19937.hpp"

namespace millrace {

// Writes a permutation of 0 ... values.size() - 1; every number must fit T.
//
// torch has two rules. Below 2^32 / 20 numbers, one 32-bit word is drawn for each step: for
// i = 0, 1, ..., n - 2, swap values[i] with values[i + word % (n - i)]. From there on, two words
// are: for i = 0, 1, ..., n - 1, number i takes the place j = words % (i + 1), and the number that
// was there moves to place i.
template <class T>
void randperm(std::span<T> values, bool has_64_bit_draws, Mt19937& random);

}  // namespace millrace
