// Equal work for ranks: packs of one global batch are dealt to them by their costs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace millrace {

// Deals items, as many to each rank, so that the dearest rank costs as little as can be found in a
// fraction of a microsecond for each item, and writes the rank of each. A pure function of the costs,
// which descend from 1e300 or less to 0 or more. Throws std::invalid_argument for other costs, and if
// the ranks cannot have as many items each.
//
// For a limit on the cost of a rank, the ranks are filled one after the other: each takes the dearest
// item that is left, and then as often as needed the dearest one with which the limit can still be
// kept. A second try keeps what cheap items are rare for the ranks that need them: it leaves room for
// ordinary ones. A limit little above the least that succeeds is found by doubling and bisection.
void deal(std::span<const double> costs, std::size_t num_ranks, std::span<std::int64_t> ranks);

}  // namespace millrace
