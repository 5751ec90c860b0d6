// A mixture without an index: a binary tree of sources, in which each node deals its samples to its
// two children by their shares. docs/instant_order.md defines it (M1 to M5).
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// The inner nodes; the root is the last one. A child below the number of leaves is that leaf, the
// other ones are inner nodes, all before their parent.
struct MixtureTree {
  std::int64_t num_leaves;
  Column<std::int32_t> left;
  Column<std::int32_t> right;
  Column<std::int64_t> share;       // of the node: at most 2^40
  Column<std::int64_t> left_share;  // of its left child, above 0 and below that of the node
  Column<std::int64_t> debt;        // what the left child is owed, in 2^-40 samples: c of M4
};

// Writes the leaf of each sample, and its number among the samples of that leaf. Throws
// std::invalid_argument for a negative number, and for arrays that are no such tree.
void draw_from_tree(const MixtureTree& tree, Column<std::int64_t> sample_numbers,
                    std::span<std::int32_t> leaves, std::span<std::int64_t> numbers);

}  // namespace millrace
