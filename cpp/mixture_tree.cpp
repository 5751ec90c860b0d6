#include "mixture_tree.hpp"

#include <algorithm>
#include <array>

#include "errors.hpp"
#include "philox.hpp"

namespace millrace {
namespace {

constexpr int one_bits = 40;  // shares add up to 2^40
constexpr std::int64_t one = std::int64_t{1} << one_bits;

struct Rest {
  std::int64_t quotient;
  std::int64_t remainder;
};

Rest divide(std::int64_t share, std::int64_t count, std::int64_t divisor) noexcept {
  const Uint128 product = Uint128(static_cast<std::uint64_t>(share)) * static_cast<std::uint64_t>(count);
  const auto by = static_cast<std::uint64_t>(divisor);
  return {static_cast<std::int64_t>(product / by), static_cast<std::int64_t>(product % by)};
}

// L(t) of M4: how many of the first `count` samples of a node its left child has.
std::int64_t left_count(std::int64_t count, Rest rest, std::int64_t share, std::int64_t debt) noexcept {
  const Uint128 scaled = Uint128(static_cast<std::uint64_t>(rest.remainder)) << one_bits;
  const auto fraction = static_cast<std::int64_t>(scaled / static_cast<std::uint64_t>(share));
  // The shift of a negative number rounds down.
  const std::int64_t rounded = rest.quotient + ((fraction + debt + one / 2) >> one_bits);
  return std::clamp<std::int64_t>(rounded, 0, count);
}

}  // namespace

void draw_from_tree(const MixtureTree& tree, Column<std::int64_t> sample_numbers,
                    std::span<std::int32_t> leaves, std::span<std::int64_t> numbers) {
  const std::size_t num_nodes = tree.left.size();
  if (tree.num_leaves != static_cast<std::int64_t>(num_nodes) + 1 ||
      std::ranges::any_of(std::array{tree.right.size(), tree.share.size(), tree.left_share.size(),
                                     tree.debt.size()},
                          [&](std::size_t size) { return size != num_nodes; })) {
    fail("a tree of ", tree.num_leaves, " leaves needs one inner node less, not ", num_nodes);
  }
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    std::int64_t number = checked(sample_numbers[i], INT64_MAX, "the sample number");
    std::int64_t node = tree.num_leaves + static_cast<std::int64_t>(num_nodes) - 1;
    while (node >= tree.num_leaves) {
      const auto place = static_cast<std::size_t>(node - tree.num_leaves);
      const std::int64_t share = tree.share[place], part = tree.left_share[place];
      if (share > one || part < 1 || part >= share) {
        fail("node ", node, " has the share ", share, ", its left child ", part);
      }
      Rest rest = divide(part, number, share);
      const std::int64_t before = left_count(number, rest, share, tree.debt[place]);
      rest.remainder += part;
      if (rest.remainder >= share) {
        rest = {rest.quotient + 1, rest.remainder - share};
      }
      const bool is_left = left_count(number + 1, rest, share, tree.debt[place]) > before;
      const std::int64_t child = is_left ? tree.left[place] : tree.right[place];
      number = is_left ? before : number - before;
      if (child < 0 || child >= node) {
        fail("node ", node, " has the child ", child);
      }
      node = child;
    }
    leaves[i] = static_cast<std::int32_t>(node);
    numbers[i] = number;
  }
}

}  // namespace millrace
