// Draws a blend without comparing every dataset for every sample, and with several threads.
//
// One sample: few datasets can win. As long as nothing is taken of a dataset, its error never falls
// from one sample to the next, in float64 too, because rounding is monotone. So a dataset whose
// error is below some floor at the end of a block of samples is below it in the whole block. Each
// block begins with a list of the candidates: the datasets that reach the floor at the block's end.
// Only the candidates are compared, by the rule's own arithmetic. If the largest of their errors
// reaches the floor, it is the largest of all. If not, the block ends early and the next one lists
// its candidates anew. This is exact for any weights: it needs no bound on rounding errors and no
// weights that sum to 1. The floor is a guess that only affects speed. It is a margin below the
// last winner's error; the margin grows when a block ends early and shrinks otherwise.
// The candidates of a short block are chosen from the candidates of a longer block
// around it, whose floor is not higher, and those from the candidates of a still longer one.
//
// Several threads: a sample depends on the samples before it only through `taken`, the number of
// samples taken of each dataset. The blend is cut into parts. Each part but the first guesses
// `taken` at a point a little before its beginning and draws from there (the warm-up). Then `taken`
// at each part's beginning is compared with `taken` at the end of the part before. Parts where they
// differ are drawn again from the latter, until there are none. If all parts before a part are
// right, it is right after one more round, so this ends, with the samples of a single part.
//
// Why it ends soon: two runs of the rule that have drawn equally many samples, but not the same
// ones, converge. Let the first draw a where the second draws b. Then the error of a is at least
// that of b in the first run, and at most that of b in the second. So the first run's lead over the
// second in a is smaller than its lead in b (if the leads were equal, a and b would have equal
// errors in both runs, and both would draw the first of them); now it grows by one in a and falls
// by one in b. The sum of the leads' absolute values thus never grows, and after a few samples per
// dataset it is mostly 0. It lasts only where a dataset is hardly ever drawn. And the guess is a
// good one: at any time all errors lie in an interval of length 1, or nearly so.
#include "blend.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <limits>
#include <numeric>
#include <system_error>
#include <vector>

#include "vector.hpp"

namespace millrace {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double no_winner = std::numeric_limits<double>::quiet_NaN();  // equals no error

constexpr std::int64_t shortest_block = 16;    // samples
constexpr std::int64_t block_growth = 8;       // a block around blocks is 8 times as long
constexpr std::int64_t shortest_part = 4096;   // samples
constexpr std::int64_t part_per_dataset = 96;  // samples; a part needs some 250 bytes per dataset
constexpr std::int64_t warmups_per_part = 32;  // a warm-up is 1/32 of a part
constexpr std::int64_t parts_per_thread = 4;   // an idle thread takes another one
constexpr int most_threads = 64;

struct Datasets {
  std::vector<double> weights;
  std::vector<double> limits;  // the number of samples to take at most, or infinity

  std::size_t size() const { return weights.size(); }
};

struct Blend {
  std::span<std::int16_t> dataset_index;
  std::span<std::int64_t> dataset_sample_index;
};

// The number of samples taken of each dataset.
using Taken = std::vector<double>;

// Some numbers in a vector register. A vector type is needed because GCC does not vectorise a loop
// that looks for the largest of some float64 numbers.
typedef double Lanes __attribute__((vector_size(MILLRACE_VECTOR_BYTES)));
constexpr std::size_t num_lanes = sizeof(Lanes) / sizeof(double);

// As many datasets. A spent dataset and an unused lane have taken = infinity and never win.
struct alignas(sizeof(Lanes)) Row {
  Lanes weight = Lanes{}, taken = Lanes{} + infinity, error = Lanes{} - infinity;
};

std::size_t rows_for(std::size_t count) { return (count + num_lanes - 1) / num_lanes; }

double position_of(std::int64_t sample) {
  return static_cast<double>(std::max<std::int64_t>(sample, 1));
}

template <class Choose>
double across(const Lanes& lanes, Choose choose) {
  double chosen = lanes[0];
  for (std::size_t lane = 1; lane < num_lanes; ++lane) {
    chosen = choose(chosen, lanes[lane]);
  }
  return chosen;
}

double larger(double left, double right) { return left > right ? left : right; }
double smaller(double left, double right) { return left < right ? left : right; }

// Counts the last winner, recognised by its error, computes all errors and returns the largest.
double update_errors(std::span<Row> rows, double last_best, double position) {
  Lanes best = Lanes{} - infinity;
  for (Row& row : rows) {
    row.taken = row.error == last_best ? row.taken + 1.0 : row.taken;
    row.error = row.weight * position - row.taken;
    best = row.error > best ? row.error : best;
  }
  return across(best, larger);
}

// Returns the first place whose error is `best`, and erases that error from all other places, so
// that `update_errors` recognises the winner.
std::size_t find_winner(std::span<Row> rows, double best) {
  Lanes place = {};
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    place[lane] = static_cast<double>(lane);
  }
  const Lanes none = Lanes{} + infinity;
  Lanes first = none, last = -none;
  for (const Row& row : rows) {
    const Lanes match = row.error == best ? place : none;
    first = match < first ? match : first;
    last = row.error == best ? place : last;
    place += static_cast<double>(num_lanes);
  }
  const auto winner = static_cast<std::size_t>(across(first, smaller));
  if (winner != static_cast<std::size_t>(across(last, larger))) [[unlikely]] {
    for (Row& row : rows) {
      row.error = -none;
    }
    rows[winner / num_lanes].error[winner % num_lanes] = best;
  }
  return winner;
}

// The candidates of a block, in order.
struct List {
  List(std::size_t capacity, std::int64_t most_samples)
      : length(most_samples), margin(1.0 / static_cast<double>(capacity)), places(capacity + 1) {}

  std::int64_t length, end = 0;  // samples
  double margin, floor = std::numeric_limits<double>::lowest();
  std::size_t count = 0;
  std::vector<Row> rows;
  std::vector<std::uint32_t> datasets;  // their numbers
  std::vector<std::uint32_t> places;    // in the list that they were chosen from
};

// Returns the list of all datasets and one list for each length of a block, the longest first.
std::vector<List> make_lists(std::size_t num_datasets) {
  std::vector<List> lists;
  const auto longest = static_cast<std::int64_t>(num_datasets) / 2;
  for (std::int64_t length = shortest_block; length < longest; length *= block_growth) {
    lists.emplace_back(num_datasets, length);
  }
  lists.emplace_back(num_datasets, 0);
  std::reverse(lists.begin(), lists.end());
  return lists;
}

// Fills `list` with the datasets of `outer` whose error reaches the floor at the block's end.
void choose_candidates(List& outer, List& list) {
  list.count = 0;
  std::uint32_t place = 0;
  for (const Row& row : outer.rows) {
    const Lanes error = row.weight * position_of(list.end - 1) - row.taken;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      list.places[list.count] = place++;  // overwritten by the next one if it is no candidate
      list.count += error[lane] >= list.floor ? 1 : 0;
    }
  }
  list.rows.assign(rows_for(list.count), Row());
  list.datasets.resize(list.count);
  for (std::size_t i = 0; i < list.count; ++i) {
    const std::uint32_t from = list.places[i];
    const Row& row = outer.rows[from / num_lanes];
    list.datasets[i] = outer.datasets[from];
    list.rows[i / num_lanes].weight[i % num_lanes] = row.weight[from % num_lanes];
    list.rows[i / num_lanes].taken[i % num_lanes] = row.taken[from % num_lanes];
  }
}

// Draws the samples [begin, end) and updates `taken`. In a warm-up `blend` is null.
MILLRACE_VECTOR_CODE
void draw(const Datasets& datasets, Taken& taken, std::int64_t begin, std::int64_t end,
          const Blend* blend) {
  std::vector<List> lists = make_lists(datasets.size());
  List& all = lists.front();
  all.count = datasets.size();
  all.rows.resize(rows_for(all.count));
  all.datasets.resize(all.count);
  all.end = end;
  std::iota(all.datasets.begin(), all.datasets.end(), std::uint32_t{0});
  for (std::size_t i = 0; i < datasets.size(); ++i) {
    all.rows[i / num_lanes].weight[i % num_lanes] = datasets.weights[i];
    all.rows[i / num_lanes].taken[i % num_lanes] =
        taken[i] == datasets.limits[i] ? infinity : taken[i];
  }
  const double spacing = 1.0 / static_cast<double>(datasets.size());  // between errors, about
  double best = update_errors(all.rows, no_winner, position_of(begin));
  std::size_t depth = 0;
  for (std::int64_t sample = begin; sample < end;) {
    for (; depth + 1 < lists.size(); ++depth) {
      List& list = lists[depth + 1];
      list.end = std::min(sample + list.length, lists[depth].end);
      list.floor = std::max(lists[depth].floor, best - list.margin);
      choose_candidates(lists[depth], list);
    }
    const List& list = lists.back();
    const std::span<Row> rows = lists.back().rows;
    double error = update_errors(rows, no_winner, position_of(sample));
    while (sample < list.end && error >= list.floor) {
      best = error;
      const std::size_t place = find_winner(rows, best);
      const std::uint32_t winner = list.datasets[place];
      const double number = rows[place / num_lanes].taken[place % num_lanes];
      if (blend != nullptr) {
        const auto i = static_cast<std::size_t>(sample);
        blend->dataset_index[i] = static_cast<std::int16_t>(winner);
        blend->dataset_sample_index[i] = static_cast<std::int64_t>(number);
      }
      if (number + 1 == datasets.limits[winner]) {
        rows[place / num_lanes].taken[place % num_lanes] = infinity;
      }
      error = update_errors(rows, best, position_of(++sample));
    }
    const bool is_early = sample < list.end;
    best = is_early ? list.floor : best;
    // Leave the blocks that are at their end and those in which no error reaches the floor.
    while (depth > 0 && (sample == lists[depth].end || best == lists[depth].floor)) {
      List& done = lists[depth--];
      done.margin = is_early ? 2 * done.margin + spacing / 16 : 0.9 * done.margin;
      for (std::size_t i = 0; i < done.count; ++i) {
        const std::uint32_t to = done.places[i];
        lists[depth].rows[to / num_lanes].taken[to % num_lanes] =
            done.rows[i / num_lanes].taken[i % num_lanes];
      }
    }
  }
  for (std::size_t i = 0; i < datasets.size(); ++i) {
    taken[i] = std::min(all.rows[i / num_lanes].taken[i % num_lanes], datasets.limits[i]);
  }
}

// Estimates what is taken before `sample`, as if each dataset were drawn as soon as its error
// passes one level common to all. The sum is exactly `sample`, and no dataset exceeds its limit.
Taken guess(const Datasets& datasets, std::int64_t sample) {
  const auto position = static_cast<double>(sample);
  const auto taken_above = [&](double level, std::size_t i) {
    const double most = std::min(datasets.limits[i], position);
    const double share = std::max(0.0, std::min(datasets.weights[i] * position - level, most));
    const auto whole = static_cast<double>(static_cast<std::int64_t>(share));
    return whole < share ? whole + 1 : whole;
  };
  const auto total = [&](double level) {
    double sum = 0;
    for (std::size_t i = 0; i < datasets.size(); ++i) {
      sum += taken_above(level, i);
    }
    return sum;
  };
  double low = -1, high = 1;  // where errors are if the weights sum to 1
  while (total(low) < position) {
    low *= 2;
  }
  while (total(high) > position) {
    high *= 2;
  }
  for (int i = 0; i < 48; ++i) {
    const double middle = low + (high - low) / 2;
    (total(middle) > position ? low : high) = middle;
  }
  Taken taken(datasets.size());
  double missing = position;
  for (const double level : {high, low}) {
    for (std::size_t i = 0; i < datasets.size(); ++i) {
      const double more = std::min(taken_above(level, i) - taken[i], missing);
      taken[i] += more;
      missing -= more;
    }
  }
  return taken;
}

// Calls work(i) for each i < count. Each thread takes the next i when it is free.
template <class Work>
void run_parallel(std::size_t count, int threads, Work work) {
  std::atomic<std::size_t> next = 0;
  const auto take = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      work(i);
    }
  };
  std::vector<std::future<void>> others;
  for (std::size_t i = 1; i < std::min(count, static_cast<std::size_t>(threads)); ++i) {
    try {
      others.push_back(std::async(std::launch::async, take));
    } catch (const std::system_error&) {
      break;  // the system has no more threads: the present ones do all the work
    }
  }
  take();
  for (std::future<void>& other : others) {
    other.get();
  }
}

// The samples [begin, end), and what is taken before and after them.
struct Part {
  std::int64_t begin, end;
  Taken taken_before, taken_after;
};

std::size_t count_parts(std::int64_t size, std::size_t num_datasets, int threads) {
  const std::int64_t shortest =
      std::max(shortest_part, part_per_dataset * static_cast<std::int64_t>(num_datasets));
  const auto count = std::clamp<std::int64_t>(size / shortest, 1, parts_per_thread * threads);
  return static_cast<std::size_t>(count > threads ? count - count % threads : count);
}

void draw_in_parts(const Datasets& datasets, const Blend& blend, int threads) {
  threads = std::clamp(threads, 1, most_threads);
  const auto size = static_cast<std::int64_t>(blend.dataset_index.size());
  std::vector<Part> parts(count_parts(size, datasets.size(), threads));
  const auto num_parts = static_cast<std::int64_t>(parts.size());
  const std::int64_t length = (size + num_parts - 1) / num_parts;
  run_parallel(parts.size(), threads, [&](std::size_t i) {
    Part& part = parts[i];
    part.begin = static_cast<std::int64_t>(i) * length;
    part.end = std::min(part.begin + length, size);
    part.taken_before.resize(datasets.size());
    if (i > 0) {
      const std::int64_t warmup = part.begin - length / warmups_per_part;
      part.taken_before = guess(datasets, warmup);
      draw(datasets, part.taken_before, warmup, part.begin, nullptr);
    }
  });
  std::vector<std::size_t> to_draw(parts.size());
  std::iota(to_draw.begin(), to_draw.end(), std::size_t{0});
  while (!to_draw.empty()) {
    run_parallel(to_draw.size(), threads, [&](std::size_t i) {
      Part& part = parts[to_draw[i]];
      part.taken_after = part.taken_before;
      draw(datasets, part.taken_after, part.begin, part.end, &blend);
    });
    to_draw.clear();
    for (std::size_t i = 1; i < parts.size(); ++i) {
      if (parts[i].taken_before != parts[i - 1].taken_after) {
        parts[i].taken_before = parts[i - 1].taken_after;
        to_draw.push_back(i);
      }
    }
  }
}

}  // namespace

void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index, int threads) {
  const Datasets datasets = {{weights.begin(), weights.end()},
                             std::vector<double>(weights.size(), infinity)};
  draw_in_parts(datasets, {dataset_index, dataset_sample_index}, threads);
}

void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index, int threads) {
  const auto total =
      static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  Datasets datasets;
  for (const std::int64_t size : sizes) {
    datasets.weights.push_back(static_cast<double>(size) / total);
    datasets.limits.push_back(static_cast<double>(size));
  }
  draw_in_parts(datasets, {dataset_index, dataset_sample_index}, threads);
}

}  // namespace millrace
