// A mixture without an index: a binary tree of sources, in which each node deals its samples to its
// two children by their shares. docs/instant_order.md defines it (M1 to M5).
#pragma once

#include <cstdint>
#include <span>

#include "column.hpp"

namespace millrace {

// An inner node. A child below the number of leaves is that leaf; the other ones are inner nodes, all
// before their parent.
struct TreeNode {
  std::int64_t left;
  std::int64_t right;
  std::int64_t share;       // at most 2^40
  std::int64_t left_share;  // of the left child: above 0 and below that of the node
  std::int64_t carry;       // c of M4: from -2^39 up to 2^39, without that
};

// Writes the leaf of each sample, and its number among the samples of that leaf. Throws
// std::invalid_argument for a negative number, and for nodes that are no such tree; the last one is the
// root.
void draw_from_tree(std::span<const TreeNode> nodes, Column<std::int64_t> sample_numbers,
                    std::span<std::int32_t> leaves, std::span<std::int64_t> numbers);

}  // namespace millrace
