// A mixture without an index: a binary tree of sources, in which each node deals its samples to its
// two children by their shares. docs/instant_order.md defines it (M1 to M5).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "column.hpp"

namespace millrace {

class MixtureTree {
 public:
  // Shares above 0 with the sum 2^40, and what each source is owed, in samples times 2^40. Throws
  // std::invalid_argument for others, and for a debt of a million samples.
  MixtureTree(Column<std::int64_t> shares, Column<std::int64_t> debts);

  std::int64_t num_leaves() const noexcept { return num_leaves_; }

  // Writes the source of each sample, and its number among the samples of that source. Throws
  // std::invalid_argument for a negative number.
  void draw(Column<std::int64_t> sample_numbers, std::span<std::int32_t> leaves,
            std::span<std::int64_t> numbers) const;

  // Writes how many of the first `number` samples, if there are any, each source has.
  void count(std::int64_t number, std::span<std::int64_t> counts) const;

 private:
  // A child below the number of leaves is that leaf; the other ones are nodes before this one.
  struct Node {
    std::int32_t left;
    std::int32_t right;
    std::int64_t share;
    std::int64_t left_share;
    std::int64_t carry;  // c of M4

    // L(t) of M4: how many of the first t samples of the node its left child has.
    std::int64_t left_count(std::int64_t count) const noexcept;
  };

  std::int64_t num_leaves_;
  std::vector<Node> nodes_;  // the last one is the root
};

}  // namespace millrace
