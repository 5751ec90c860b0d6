#include "mixture_tree.hpp"

#include <algorithm>

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

// L(t) of M4, of l * t / w: how many of the first t samples of a node its left child has.
std::int64_t left_count(Rest rest, std::int64_t share, std::int64_t carry) noexcept {
  const Uint128 scaled = Uint128(static_cast<std::uint64_t>(rest.remainder)) << one_bits;
  const auto fraction = static_cast<std::int64_t>(scaled / static_cast<std::uint64_t>(share));
  return rest.quotient + ((fraction + carry + one / 2) >> one_bits);
}

}  // namespace

void draw_from_tree(std::span<const TreeNode> nodes, Column<std::int64_t> sample_numbers,
                    std::span<std::int32_t> leaves, std::span<std::int64_t> numbers) {
  const auto num_leaves = static_cast<std::int64_t>(nodes.size()) + 1;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    std::int64_t number = checked(sample_numbers[i], INT64_MAX, "the sample number");
    std::int64_t place = 2 * num_leaves - 2;  // the root's, behind all leaves and other nodes
    while (place >= num_leaves) {
      const TreeNode& node = nodes[static_cast<std::size_t>(place - num_leaves)];
      const auto [left, right, share, part, carry] = node;
      if (share > one || part < 1 || part >= share || carry < -one / 2 || carry >= one / 2 ||
          std::min(left, right) < 0 || std::max(left, right) >= place) {
        fail("node ", place, " of the tree has the children ", left, " and ", right, ", the share ",
             share, ", ", part, " of it on the left, and carries ", carry);
      }
      Rest rest = divide(part, number, share);
      const std::int64_t before = left_count(rest, share, carry);
      rest.remainder += part;
      if (rest.remainder >= share) {
        rest = {rest.quotient + 1, rest.remainder - share};
      }
      const bool is_left = left_count(rest, share, carry) > before;
      number = is_left ? before : number - before;
      place = is_left ? left : right;
    }
    leaves[i] = static_cast<std::int32_t>(place);
    numbers[i] = number;
  }
}

}  // namespace millrace
