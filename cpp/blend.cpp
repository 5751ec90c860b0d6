// How a blend is drawn at many places at once, though each sample depends on all before it.
//
// All that later samples depend on is how many were drawn of each dataset so far. So the blend is
// cut into parts, and each part but the first starts from a guess of these numbers, a little before
// it begins: a warm-up. Then every part's numbers at its beginning are compared with those at the
// end of the part before it. Where they are equal, and the part before is right, so is this one;
// where they are not, it is drawn again from the right ones. At least the first wrong part is
// mended each time, so this ends, with the samples that one part alone would give.
//
// Why it ends soon: two runs of the greedy rule that have drawn equally many samples, but not the
// same ones, come together. Let the first draw a where the second draws b. Then the error of a is
// at least that of b in the first run, and at most that of b in the second. So the first run's lead
// over the second in a is smaller than its lead in b (if they were equal, so were the errors, and
// both would draw the first of equals); now it grows by one in a and falls by one in b. The sum of
// all leads, taken as positive, thus never grows, and after a few samples a dataset it is mostly 0.
// It lasts only where a dataset is hardly ever drawn. And the guess is a good one: at any time all
// errors lie in an interval of length 1, or nearly so.
#include "blend.hpp"

#include <algorithm>
#include <cstddef>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "blend_team.hpp"

namespace millrace {
namespace {

constexpr std::int64_t shortest_part = 4096;  // samples
constexpr std::int64_t part_per_group = 64;   // samples; a part needs some 40 bytes for a group
constexpr std::int64_t warmups_per_part = 32;
constexpr int most_threads = 64;

// The datasets whose limit is above 0, by weight and limit where that makes groups.
BlendGroups group(std::span<const double> weights, std::span<const double> limits,
                  std::int64_t size) {
  BlendGroups groups;
  std::vector<std::size_t> open;
  double largest_weight = 0;
  for (std::size_t dataset = 0; dataset < weights.size(); ++dataset) {
    if (limits[dataset] > 0) {
      open.push_back(dataset);
      largest_weight = std::max(largest_weight, weights[dataset]);
      groups.limited |= limits[dataset] < infinity;
    }
  }
  const auto key = [&](std::size_t dataset) {
    return std::pair(weights[dataset], limits[dataset]);
  };
  std::vector<std::size_t> sorted = open;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](std::size_t left, std::size_t right) { return key(left) < key(right); });
  std::size_t num_keys = sorted.empty() ? 0 : 1;
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    num_keys += key(sorted[i]) != key(sorted[i - 1]) ? 1 : 0;
  }
  // In turns where it at least halves the number, and an error tells `taken` from `taken` + 1.
  groups.turns =
      2 * num_keys <= open.size() && largest_weight * static_cast<double>(size) < 0x1p52;
  const std::vector<std::size_t>& members = groups.turns ? sorted : open;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!groups.turns || i == 0 || key(members[i]) != key(members[i - 1])) {
      groups.begin.push_back(static_cast<std::int32_t>(i));
      groups.weight.push_back(weights[members[i]]);
      groups.limit.push_back(limits[members[i]]);
    }
    groups.members.push_back(static_cast<std::int32_t>(members[i]));
  }
  groups.begin.push_back(static_cast<std::int32_t>(members.size()));
  groups.weight.resize(BlendGroups::padded(groups.size()));
  return groups;
}

// How many samples of each group are drawn before `sample`, about: as if a dataset were drawn as
// soon as its error passes a level, which is the same for all and such that the sum is right.
// Nothing where float64 cannot tell such a level.
std::optional<Drawn> guess(const BlendGroups& groups, std::int64_t sample) {
  const auto position = static_cast<double>(sample);
  const auto drawn_above = [&](double level, std::size_t number) {
    const double most = std::min(groups.limit[number], position);
    const double share = std::min(groups.weight[number] * position - level, most);
    const auto whole = static_cast<std::int64_t>(std::max(share, 0.0));
    const std::int64_t rounded_up = whole + (static_cast<double>(whole) < share ? 1 : 0);
    return rounded_up * groups.num_members(number);
  };
  const auto total = [&](double level) {
    double sum = 0;
    for (std::size_t number = 0; number < groups.size(); ++number) {
      sum += static_cast<double>(drawn_above(level, number));
    }
    return sum;
  };
  double low = -1, high = 1;  // errors are there if the weights' sum is 1
  while (total(low) < position && low > -0x1p60) {
    low *= 2;
  }
  while (total(high) > position && high < 0x1p60) {
    high *= 2;
  }
  for (int i = 0; i < 48; ++i) {
    const double middle = low + (high - low) / 2;
    (total(middle) > position ? low : high) = middle;
  }
  Drawn drawn(groups.size());
  std::int64_t missing = sample;
  for (std::size_t number = 0; number < drawn.size(); ++number) {
    drawn[number] = drawn_above(high, number);
    missing -= drawn[number];
  }
  for (std::size_t number = 0; number < drawn.size() && missing > 0; ++number) {
    const std::int64_t more = std::min(drawn_above(low, number) - drawn[number], missing);
    drawn[number] += more;
    missing -= more;
  }
  return missing == 0 ? std::optional(std::move(drawn)) : std::nullopt;
}

// The parts of a blend: part p starts at p * length, and its own samples begin a warm-up later,
// where those of the part before it end. What it draws before that is drawn again by that part,
// later.
class Parts {
 public:
  Parts(const BlendGroups& groups, std::span<std::int16_t> dataset_index,
        std::span<std::int64_t> dataset_sample_index, int threads)
      : size_(dataset_index.size()) {
    const auto most = static_cast<std::size_t>(std::clamp(threads, 1, most_threads)) *
                      BlendTeam::num_parts;
    const auto shortest = static_cast<std::size_t>(
        std::max(shortest_part, part_per_group * static_cast<std::int64_t>(groups.size())));
    cut(std::clamp<std::size_t>(size_ / shortest, 1, most));
    std::vector<Drawn> starts = {Drawn(groups.size())};
    for (std::size_t part = 1; part < num_parts_; ++part) {
      std::optional<Drawn> drawn = guess(groups, static_cast<std::int64_t>(part * length_));
      if (!drawn) {
        cut(1);
        break;
      }
      starts.push_back(std::move(*drawn));
    }
    for (std::size_t i = 0; i * BlendTeam::num_parts < num_parts_; ++i) {
      teams_.push_back(std::make_unique<BlendTeam>(groups, dataset_index.data(),
                                                   dataset_sample_index.data()));
    }
    for (std::size_t part = 0; part < num_parts_; ++part) {
      start(part, starts[part], part * length_);
    }
  }

  void draw() {
    run(warmup_);
    std::vector<Drawn> begins;  // of each part, what had been drawn where its own samples begin
    for (std::size_t part = 0; part < num_parts_; ++part) {
      begins.push_back(drawn(part));
    }
    for (bool is_right = false; !is_right;) {
      run(size_);
      is_right = true;
      for (std::size_t part = num_parts_; --part > 0;) {  // backwards: a start forgets the end
        Drawn before = drawn(part - 1);
        if (begins[part] != before) {
          is_right = false;
          start(part, before, part * length_ + warmup_);
          begins[part] = std::move(before);
        }
      }
    }
  }

 private:
  void cut(std::size_t num_parts) {
    num_parts_ = num_parts;
    warmup_ = num_parts == 1 ? 0 : size_ / num_parts / warmups_per_part;
    length_ = (size_ - warmup_ + num_parts - 1) / num_parts;
  }

  void start(std::size_t part, const Drawn& drawn, std::size_t sample) {
    const std::size_t stop = std::min((part + 1) * length_ + warmup_, size_);
    teams_[part % teams_.size()]->start(part / teams_.size(), drawn,
                                        static_cast<std::int64_t>(sample),
                                        static_cast<std::int64_t>(stop));
  }

  Drawn drawn(std::size_t part) {
    return teams_[part % teams_.size()]->drawn(part / teams_.size());
  }

  void run(std::size_t num_samples) {
    const auto number = static_cast<std::int64_t>(num_samples);
    std::vector<std::future<void>> others;
    for (std::size_t i = 1; i < teams_.size(); ++i) {
      const auto work = [team = teams_[i].get(), number] { team->run(number); };
      try {
        others.push_back(std::async(std::launch::async, work));
      } catch (const std::system_error&) {  // no thread to be had
        work();
      }
    }
    teams_[0]->run(number);
    for (std::future<void>& other : others) {
      other.get();
    }
  }

  std::size_t size_, num_parts_ = 1, warmup_ = 0, length_ = 0;
  std::vector<std::unique_ptr<BlendTeam>> teams_;
};

void draw(std::span<const double> weights, std::span<const double> limits,
          std::span<std::int16_t> dataset_index, std::span<std::int64_t> dataset_sample_index,
          int threads) {
  const auto size = static_cast<std::int64_t>(dataset_index.size());
  const BlendGroups groups = group(weights, limits, size);
  Parts(groups, dataset_index, dataset_sample_index, threads).draw();
}

}  // namespace

void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, int threads) {
  const std::vector<double> limits(weights.size(), infinity);
  draw(weights, limits, dataset_index, dataset_sample_index, threads);
}

void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index, int threads) {
  const auto total =
      static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  std::vector<double> weights, limits;
  for (const std::int64_t size : sizes) {
    weights.push_back(static_cast<double>(size) / total);
    limits.push_back(static_cast<double>(size));
  }
  draw(weights, limits, dataset_index, dataset_sample_index, threads);
}

}  // namespace millrace
