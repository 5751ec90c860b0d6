#include "mixture_tree.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

#include "errors.hpp"
#include "philox.hpp"

namespace millrace {
namespace {

constexpr int one_bits = 40;  // shares add up to 2^40
constexpr std::int64_t one = std::int64_t{1} << one_bits;
constexpr std::int64_t debt_limit = one << 20;

Uint128 product(std::int64_t share, std::int64_t count) noexcept {
  return Uint128(static_cast<std::uint64_t>(share)) * static_cast<std::uint64_t>(count);
}

}  // namespace

std::int64_t MixtureTree::Node::left_count(std::int64_t count) const noexcept {
  const Uint128 scaled = product(left_share, count);
  const auto by = static_cast<std::uint64_t>(share);
  const auto fraction = static_cast<std::int64_t>(((scaled % by) << one_bits) / by);
  return static_cast<std::int64_t>(scaled / by) + ((fraction + carry + one / 2) >> one_bits);
}

MixtureTree::MixtureTree(Column<std::int64_t> shares, Column<std::int64_t> debts)
    : num_leaves_(static_cast<std::int64_t>(shares.size())) {
  using Item = std::tuple<std::int64_t, std::int32_t, std::int64_t>;  // share, place and debt
  std::priority_queue<Item, std::vector<Item>, std::greater<>> heap;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < std::min(shares.size(), debts.size()); ++i) {
    total += checked(shares[i] - 1, one - total, "a share - 1") + 1;
    checked(debts[i] + debt_limit, 2 * debt_limit, "a debt + 2^60");
    heap.emplace(shares[i], static_cast<std::int32_t>(i), debts[i]);
  }
  if (total != one || debts.size() != shares.size()) {
    fail(shares.size(), " shares with ", debts.size(), " debts add up to ", total, ", not to 2^40");
  }
  nodes_.reserve(shares.size() - 1);
  while (heap.size() > 1) {
    const auto [left_share, left, left_debt] = heap.top();
    heap.pop();
    const auto [right_share, right, right_debt] = heap.top();
    heap.pop();
    const std::int64_t share = left_share + right_share, apart = left_debt - right_debt;
    // Three sixteenths: more is too much for a phase, less for the sum of many.
    const std::int64_t carry = std::clamp((3 * apart) >> 4, -one / 2, one / 2 - 1);
    // The mean of M3, rounded down: the right child's debt, and the left one's share of what is apart.
    const Uint128 scaled = product(left_share, std::abs(apart)) + Uint128(apart < 0 ? share - 1 : 0);
    const auto part = static_cast<std::int64_t>(scaled / static_cast<std::uint64_t>(share));
    const auto place = static_cast<std::int32_t>(shares.size() + nodes_.size());
    nodes_.push_back({left, right, share, left_share, carry});
    heap.emplace(share, place, right_debt + (apart < 0 ? -part : part));
  }
}

void MixtureTree::draw(Column<std::int64_t> sample_numbers, std::span<std::int32_t> leaves,
                       std::span<std::int64_t> numbers) const {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    std::int64_t number = checked(sample_numbers[i], INT64_MAX, "the sample number");
    std::int64_t place = 2 * num_leaves_ - 2;  // the root's, behind all leaves and other nodes
    while (place >= num_leaves_) {
      const Node& node = nodes_[static_cast<std::size_t>(place - num_leaves_)];
      const std::int64_t before = node.left_count(number);
      const bool is_left = node.left_count(number + 1) > before;
      number = is_left ? before : number - before;
      place = is_left ? node.left : node.right;
    }
    leaves[i] = static_cast<std::int32_t>(place);
    numbers[i] = number;
  }
}

void MixtureTree::count(std::int64_t number, std::span<std::int64_t> counts) const {
  std::vector<std::int64_t> all(counts.size() + nodes_.size());
  all.back() = std::max(number, std::int64_t{0});
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    const std::int64_t of_node = all[counts.size() + i], of_left = nodes_[i].left_count(of_node);
    all[static_cast<std::size_t>(nodes_[i].left)] = of_left;
    all[static_cast<std::size_t>(nodes_[i].right)] = of_node - of_left;
  }
  std::copy_n(all.begin(), counts.size(), counts.begin());
}

}  // namespace millrace
