#include "balance.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "errors.hpp"

namespace millrace {
namespace {

constexpr int num_bisections = 6;

// Places among `costs`, the dearest first, each free or taken.
class FreePlaces {
 public:
  explicit FreePlaces(std::size_t size) : next_(size + 1), before_(size + 1) {
    std::iota(next_.begin(), next_.end(), std::size_t{0});
    std::iota(before_.begin(), before_.end(), std::size_t{0});
  }

  void take(std::size_t place) {
    next_[place] = place + 1;
    before_[place + 1] = place;
  }

  // The first free place from this one on; the number of places if there is none.
  std::size_t first(std::size_t place) { return find(next_, place); }

  // The number of places up to the last free one among so many.
  std::size_t count_to_last(std::size_t count) { return find(before_, count); }

 private:
  static std::size_t find(std::vector<std::size_t>& links, std::size_t place) {
    while (links[place] != place) {
      links[place] = links[links[place]];
      place = links[place];
    }
    return place;
  }

  std::vector<std::size_t> next_;
  std::vector<std::size_t> before_;
};

class Deal {
 public:
  Deal(std::span<const double> costs, std::size_t num_ranks)
      : costs_(costs),
        ranks_(num_ranks),
        items_of_rank_(costs.size() / num_ranks),
        rank_of_(costs.size()) {}

  std::vector<std::int64_t> best() {
    const double least = lower_bound();
    double excess = 0.001;
    while (!fits(least * (1 + excess))) {  // at the latest when all items fit each rank
      excess *= 2;
    }
    std::vector<std::int64_t> best = rank_of_;
    double too_low = excess / 2;
    for (int i = 0; i < num_bisections && excess - too_low > 0.001; ++i) {
      const double middle = (too_low + excess) / 2;
      if (fits(least * (1 + middle))) {
        best = rank_of_;
        excess = middle;
      } else {
        too_low = middle;
      }
    }
    return best;
  }

 private:
  // What some rank costs at least: the mean, and for any number of the dearest items the mean of so
  // many ranks that have these, and else the cheapest.
  double lower_bound() const {
    double least = std::accumulate(costs_.begin(), costs_.end(), 0.0) / static_cast<double>(ranks_);
    double sum = 0;
    std::size_t end = costs_.size();
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      sum += costs_[rank];
      for (std::size_t i = 1; i < items_of_rank_; ++i) {
        sum += costs_[--end];
      }
      least = std::max(least, sum / static_cast<double>(rank + 1));
    }
    return least;
  }

  bool fits(double limit) {
    return fill(limit, 0) || fill(limit, costs_[costs_.size() * 31 / 32]);
  }

  // Deals with no rank above the limit; false if that fails.
  bool fill(double limit, double reserve) {
    FreePlaces free(costs_.size());
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      double room = limit;
      for (std::size_t left = items_of_rank_; left > 0; --left) {
        double rest = 0;  // of the cheapest items, that the rank needs behind this one
        std::size_t end = costs_.size();
        for (std::size_t i = 1; i < left; ++i) {
          end = free.count_to_last(end) - 1;
          rest += costs_[end];
        }
        const auto dearest_in = [&](double most) {
          const auto found =
              std::lower_bound(costs_.begin(), costs_.end(), most, std::greater<>());
          return free.first(static_cast<std::size_t>(found - costs_.begin()));
        };
        std::size_t place = 0;
        if (left == items_of_rank_) {
          place = free.first(0);
        } else if (place = dearest_in(room - std::max(rest, static_cast<double>(left - 1) * reserve));
                   place == costs_.size()) {
          place = dearest_in(room - rest);
          if (place >= end) {
            return false;
          }
        }
        if (costs_[place] > room - (left == items_of_rank_ ? rest : 0)) {
          return false;
        }
        free.take(place);
        room -= costs_[place];
        rank_of_[place] = static_cast<std::int64_t>(rank);
      }
    }
    return true;
  }

  std::span<const double> costs_;
  std::size_t ranks_;
  std::size_t items_of_rank_;
  std::vector<std::int64_t> rank_of_;  // of each item
};

}  // namespace

void deal(std::span<const double> costs, std::size_t num_ranks, std::span<std::int64_t> ranks) {
  if (num_ranks == 0 || costs.size() % num_ranks != 0) {
    fail(costs.size(), " items cannot be dealt evenly to ", num_ranks, " ranks");
  }
  double most = 1e300;  // sums are finite
  for (const double cost : costs) {
    if (!(cost >= 0 && cost <= most)) {
      fail("a cost is ", cost, "; costs must be between 0 and 1e300, the dearest first");
    }
    most = cost;
  }
  if (!costs.empty()) {
    std::ranges::copy(Deal(costs, num_ranks).best(), ranks.begin());
  }
}

}  // namespace millrace
