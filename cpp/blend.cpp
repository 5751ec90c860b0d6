// How the winner of each sample is found without looking at every dataset.
//
// 1. Groups. Datasets of equal weight (and size) have equal errors as long as as many samples were
//    taken of them, so they take turns, in order; they are one group, and what was `taken` of it is
//    the number of finished turns. (That holds while an error tells `taken` from `taken` + 1, hence
//    below 2^52; beyond, and where it would not halve the number, each dataset is its own group.)
// 2. A floor. Only groups whose error reaches the floor within the present block of samples are in
//    the lanes, where errors are computed and compared sample by sample, by the rule itself. All
//    other groups wait in a calendar, in the slot of the block in which they may next reach it.
//    If the largest error in the lanes is not below the floor, it is the largest of all.
// 3. The floor follows the winners. If no error in the lanes reaches it, it is lowered, and all
//    groups are placed anew; if the lanes become crowded, it is raised, which leaves the calendar
//    right (an entry may be early: it is looked at again when its slot comes up).
//
// Why this is exact, for any weights: rounding is monotone, so for one `taken` the rounded product
// weight * n and the rounded difference to `taken` never fall as n grows, nor rise as `taken` does.
// A group whose rounded error is below the floor at the last sample of a block is thus below it at
// every earlier one. `postpone` checks just that, by the rule's own arithmetic: its estimate of when
// a group is due decides how long it waits, never who wins. Nothing here depends on a bound on
// rounding errors, nor on weights that sum to 1; if they are far from it, only speed is lost.
#include "blend.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

// What is called by code for one kind of processor must become part of it.
#define MILLRACE_INLINE inline __attribute__((always_inline))

namespace millrace {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

constexpr std::int64_t block_size = 16;  // samples
constexpr std::size_t lane_step = 8;     // lanes come in multiples, so that vectors are full
constexpr std::size_t most_register_lanes = 64;
constexpr std::size_t fewest_wanted = 8;  // groups at or above the floor
constexpr std::size_t crowd = 16;         // as many more, and the floor is raised

// A lane's tag is one_hit + (lane << 16) + group, in float64 as errors are: summed over the lanes
// with the largest error, tags tell how many these are (at most 2^15) and, if it is one, which.
constexpr std::int64_t one_hit = std::int64_t{1} << 32;
constexpr int lane_shift = 16;

struct Group {
  double limit;             // what may be taken of each member
  std::int32_t begin, end;  // in `members`
  std::int32_t next;        // whose turn it is
};

struct Lanes {
  std::size_t count = 0;
  std::vector<double> weight, taken, error, tag;

  void set(std::size_t lane, double new_weight, double new_taken, std::size_t group) {
    weight.data()[lane] = new_weight;
    taken.data()[lane] = new_taken;
    tag.data()[lane] = static_cast<double>(
        one_hit + static_cast<std::int64_t>(lane << lane_shift | group));
  }

  std::size_t group(std::size_t lane) const {
    return static_cast<std::uint16_t>(static_cast<std::int64_t>(tag.data()[lane]));
  }
};

struct Blend {
  std::int16_t* dataset_index = nullptr;
  std::int64_t* dataset_sample_index = nullptr;
  std::vector<std::int32_t> members;  // datasets, those of a group together and ascending
  std::vector<Group> groups;
  std::vector<double> weight, taken;  // of each group; infinity is taken once it is spent
  bool turns = false;                 // some group has several members
  double floor = -infinity;
  Lanes lanes;
  // The calendar: a slot holds the groups that are due in the blocks of its number, modulo the
  // number of slots (a power of two), as a list that goes on in `next`; -1 ends it.
  std::vector<std::int32_t> slots, next;
};

MILLRACE_INLINE double error_of(double weight, std::int64_t sample, double taken) {
  return weight * static_cast<double>(std::max<std::int64_t>(sample, 1)) - taken;
}

MILLRACE_INLINE std::int64_t last_sample(std::int64_t block) {
  return block * block_size + block_size - 1;
}

// Puts a group that is below the floor throughout `block` into the slot of a later one, up to which
// it stays below.
MILLRACE_INLINE void postpone(Blend& blend, std::size_t group, double taken, std::int64_t block) {
  const std::size_t num_slots = blend.slots.size();
  const double weight = blend.weight.data()[group];
  const auto soonest = static_cast<double>(block + 1);
  const auto latest = static_cast<double>(block + static_cast<std::int64_t>(num_slots) - 1);
  const double estimate = (taken + blend.floor) / weight * (1.0 / block_size);
  const double no_sooner = estimate > soonest ? estimate : soonest;  // also where it is not a number
  auto due = static_cast<std::int64_t>(no_sooner < latest ? no_sooner : latest);
  while (error_of(weight, last_sample(due - 1), taken) >= blend.floor) {
    --due;
  }
  std::int32_t& head = blend.slots.data()[static_cast<std::size_t>(due) & (num_slots - 1)];
  blend.next.data()[group] = head;
  head = static_cast<std::int32_t>(group);
}

// ---- the lanes' part, in vectors ----

// By typedef: in an alias, GCC drops the attributes. Arrays of double are read and written by these.
template <std::size_t size>
struct Vectors {
  static constexpr std::size_t width = size;
  typedef double Doubles __attribute__((vector_size(size * 8), aligned(8), may_alias));
};

template <class V>
struct Columns {
  typename V::Doubles *weight, *taken, *error, *tag;
  std::size_t count;  // vectors
};

template <class V>
MILLRACE_INLINE Columns<V> columns_of(Lanes& lanes) {
  using Doubles = typename V::Doubles;
  return {reinterpret_cast<Doubles*>(lanes.weight.data()),
          reinterpret_cast<Doubles*>(lanes.taken.data()),
          reinterpret_cast<Doubles*>(lanes.error.data()),
          reinterpret_cast<Doubles*>(lanes.tag.data()),
          (lanes.count + lane_step - 1) / lane_step * (lane_step / V::width)};
}

// The numbers of a vector combined by halves, which is quicker than one after the other.
template <class V, class Combine>
MILLRACE_INLINE double fold(const typename V::Doubles& values, Combine combine) {
  if constexpr (V::width == 2) {
    const double first = values[0], second = values[1];
    double result;
    combine(first, second, result);
    return result;
  } else {
    using Half = Vectors<V::width / 2>;
    typename Half::Doubles low, high, result;
    std::memcpy(&low, &values, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&values) + sizeof low, sizeof high);
    combine(low, high, result);
    return fold<Half>(result, combine);
  }
}

constexpr auto larger = [](const auto& left, const auto& right, auto& result)
                            __attribute__((always_inline)) {
                              result = left > right ? left : right;
                            };
constexpr auto sum = [](const auto& left, const auto& right, auto& result)
                         __attribute__((always_inline)) { result = left + right; };

// The tag of the lane that wins a tie: its dataset is the first one.
template <class V>
MILLRACE_INLINE double first_tag(const Columns<V>& lanes, const Blend& blend, double best) {
  std::int32_t first = std::numeric_limits<std::int32_t>::max();
  double tag = 0;
  for (std::size_t i = 0; i < lanes.count; ++i) {
    const typename V::Doubles errors = lanes.error[i], tags = lanes.tag[i];
    for (std::size_t k = 0; k < V::width; ++k) {
      if (errors[k] == best && tags[k] != 0) {
        const auto group = static_cast<std::uint16_t>(static_cast<std::int64_t>(tags[k]));
        const std::int32_t dataset = blend.members.data()[blend.groups.data()[group].next];
        if (dataset < first) {
          first = dataset;
          tag = tags[k];
        }
      }
    }
  }
  return tag;
}

enum class End { stop, below_floor, spent };

struct Drawn {
  std::int64_t sample;  // the next one
  End end;
  std::size_t lane;  // of the spent group
};

// Draws the samples from `sample` to `stop`, which lie in one block if there is a floor.
//
// With turns, `taken` grows at the end of a turn alone.
template <class V, bool turns>
MILLRACE_INLINE Drawn draw_from(const Columns<V>& lanes, Blend& blend, std::int64_t sample,
                                std::int64_t stop) {
  using Doubles = typename V::Doubles;
  const double floor = blend.floor;
  const std::int64_t next_block = sample / block_size + 1;
  const std::int32_t* members = blend.members.data();
  Group* groups = blend.groups.data();
  const double* weight_of = blend.weight.data();
  double* taken_of = blend.taken.data();
  std::int16_t* dataset_index = blend.dataset_index;
  std::int64_t* dataset_sample_index = blend.dataset_sample_index;

  // Wide: maxima and sums go in two halves, as one chain of them would take longer than the rest.
  const bool is_wide = lanes.count * V::width > 2 * lane_step;
  auto position = static_cast<double>(std::max<std::int64_t>(sample, 1));
  for (std::size_t i = 0; i < lanes.count; ++i) {
    lanes.error[i] = lanes.weight[i] * position - lanes.taken[i];
  }
  for (; sample < stop; ++sample) {
    Doubles largest = lanes.error[0], other = largest;
    for (std::size_t i = 1; i < lanes.count; ++i) {
      Doubles& part = is_wide && i % 2 != 0 ? other : largest;
      part = part > lanes.error[i] ? part : lanes.error[i];
    }
    largest = largest > other ? largest : other;
    const double best = fold<V>(largest, larger);
    if (best < floor) {
      return {sample, End::below_floor, 0};
    }
    Doubles tags = {}, more_tags = {};
    for (std::size_t i = 0; i < lanes.count; ++i) {
      (is_wide && i % 2 != 0 ? more_tags : tags) += lanes.error[i] == best ? lanes.tag[i] : Doubles{};
    }
    tags += more_tags;
    double winner = fold<V>(tags, sum);
    if (__builtin_expect(winner >= 2.0 * one_hit, 0)) {
      winner = first_tag<V>(lanes, blend, best);
      for (std::size_t i = 0; i < lanes.count; ++i) {
        lanes.error[i] = lanes.tag[i] == winner ? lanes.error[i] : Doubles{} - infinity;
      }
    }
    position = static_cast<double>(sample + 1);
    if constexpr (!turns) {
      // No error is above `best`: >= and < ask for the winner too. Several uses of one == would be
      // compiled to code for each number by itself (GCC 12, for vectors of 64 bytes).
      for (std::size_t i = 0; i < lanes.count; ++i) {
        if (!is_wide) {
          // What counts here is the time from errors to errors: both cases are computed before it
          // is known which one it is (8 datasets: 7.7 ns a sample instead of 8.3).
          const Doubles product = lanes.weight[i] * position;
          const Doubles more = lanes.taken[i] + 1.0;
          const Doubles if_kept = product - lanes.taken[i];
          const Doubles if_taken = product - more;
          lanes.taken[i] = lanes.error[i] < best ? lanes.taken[i] : more;
          lanes.error[i] = lanes.error[i] >= best ? if_taken : if_kept;
        } else {
          lanes.taken[i] += lanes.error[i] >= best ? Doubles{} + 1.0 : Doubles{};
          lanes.error[i] = lanes.weight[i] * position - lanes.taken[i];
        }
      }
    }

    const auto tag = static_cast<std::int64_t>(winner);
    const std::size_t number = static_cast<std::uint16_t>(tag);
    const std::size_t lane = static_cast<std::uint16_t>(tag >> lane_shift);
    Group& group = groups[number];
    double taken = taken_of[number];
    dataset_index[sample] = static_cast<std::int16_t>(members[group.next]);
    dataset_sample_index[sample] = static_cast<std::int64_t>(taken);
    if (!turns || ++group.next == group.end) {
      group.next = group.begin;
      taken += 1.0;
      taken_of[number] = taken;
      if (taken == group.limit) {
        taken_of[number] = infinity;
        return {sample + 1, End::spent, lane};
      }
      // It cannot win again in this block, and leaves the lanes at the end of it.
      if (error_of(weight_of[number], last_sample(next_block), taken) < floor) {
        postpone(blend, number, taken, next_block);
      }
      if constexpr (turns) {
        for (std::size_t i = 0; i < lanes.count; ++i) {
          lanes.taken[i] += lanes.tag[i] == winner ? Doubles{} + 1.0 : Doubles{};
        }
      }
    }
    if constexpr (turns) {
      for (std::size_t i = 0; i < lanes.count; ++i) {
        lanes.error[i] = lanes.weight[i] * position - lanes.taken[i];
      }
    }
  }
  return {sample, End::stop, 0};
}

// The same with the lanes in registers, for a number of them that is known to the compiler: the
// smallest one, up to `num_lanes`, that holds them all.
template <class V, std::size_t num_lanes>
MILLRACE_INLINE Drawn draw_in_registers(const Columns<V>& memory, Blend& blend, std::int64_t sample,
                                        std::int64_t stop) {
  constexpr std::size_t count = num_lanes / V::width;
  if constexpr (num_lanes > lane_step) {
    if (memory.count < count) {
      return draw_in_registers<V, num_lanes - lane_step>(memory, blend, sample, stop);
    }
  }
  typename V::Doubles weight[count], taken[count], error[count], tag[count];
  for (std::size_t i = 0; i < count; ++i) {
    weight[i] = memory.weight[i];
    taken[i] = memory.taken[i];
    tag[i] = memory.tag[i];
  }
  const Drawn drawn =
      draw_from<V, false>({weight, taken, error, tag, count}, blend, sample, stop);
  for (std::size_t i = 0; i < count; ++i) {
    memory.taken[i] = taken[i];
  }
  return drawn;
}

template <std::size_t width>
MILLRACE_INLINE Drawn draw_with(Blend& blend, std::int64_t sample, std::int64_t stop) {
  using Wide = Vectors<width>;
  using Narrow = Vectors<std::min<std::size_t>(width, 4)>;  // has fewer halves to fold
  if (blend.turns) {
    return draw_from<Wide, true>(columns_of<Wide>(blend.lanes), blend, sample, stop);
  }
  if (blend.lanes.count > most_register_lanes) {
    return draw_from<Wide, false>(columns_of<Wide>(blend.lanes), blend, sample, stop);
  }
  if (blend.lanes.count <= 2 * lane_step) {
    return draw_in_registers<Narrow, 2 * lane_step>(columns_of<Narrow>(blend.lanes), blend, sample,
                                                    stop);
  }
  return draw_in_registers<Wide, most_register_lanes>(columns_of<Wide>(blend.lanes), blend, sample,
                                                      stop);
}

Drawn draw_portably(Blend& blend, std::int64_t sample, std::int64_t stop) {
  return draw_with<2>(blend, sample, stop);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) Drawn draw_by_avx2(Blend& blend, std::int64_t sample,
                                                   std::int64_t stop) {
  return draw_with<4>(blend, sample, stop);
}

__attribute__((target("avx512f,avx512vl,avx512dq"))) Drawn draw_by_avx512(Blend& blend,
                                                                          std::int64_t sample,
                                                                          std::int64_t stop) {
  return draw_with<8>(blend, sample, stop);
}
#endif

// What this machine can do, and how many groups it handles sooner without a floor.
struct Code {
  Drawn (*draw)(Blend& blend, std::int64_t sample, std::int64_t stop);
  std::size_t few_groups;
};

Code choose_code() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return {&draw_by_avx512, 64};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {&draw_by_avx2, 32};
  }
#endif
  return {&draw_portably, 16};
}

// ---- the floor and the calendar ----

class Blender {
 public:
  explicit Blender(Blend& blend) : blend_(blend), code_(choose_code()) {
    const std::size_t num_groups = blend.groups.size();
    const std::size_t num_lanes = (num_groups + lane_step - 1) / lane_step * lane_step;
    Lanes& lanes = blend.lanes;
    for (auto* column : {&lanes.weight, &lanes.taken, &lanes.error, &lanes.tag}) {
      column->resize(num_lanes);
    }
    blend.slots.resize(std::bit_ceil(num_groups + 1));
    blend.next.resize(num_groups);
    errors_.resize(num_groups);
  }

  void draw(std::int64_t size) {
    lower_floor(0);
    for (std::int64_t sample = 0; sample < size;) {
      const bool all = blend_.floor == -infinity;  // are in the lanes, and blocks mean nothing
      const std::int64_t block = sample / block_size;
      const std::int64_t stop = std::min(all ? size : (block + 1) * block_size, size);
      const Drawn drawn = code_.draw(blend_, sample, stop);
      sample = drawn.sample;
      if (drawn.end == End::below_floor) {
        lower_floor(sample);
        continue;
      }
      if (drawn.end == End::spent) {
        blend_.lanes.taken[drawn.lane] = infinity;
      }
      if (sample == stop && !all) {
        begin_block(block + 1);
      }
    }
  }

 private:
  // So that `wanted_` groups reach it at `sample`, or all if they are few; and places all groups.
  //
  // That takes some 10 ns a group; a group more in the lanes, 0.3 ns a sample. Hence twice as many
  // are wanted if this happens often, and half as many after a long time without it.
  void lower_floor(std::int64_t sample) {
    const std::size_t num_groups = blend_.groups.size();
    if (sample > 0 && since_change(sample) < 32 * num_groups) {
      wanted_ *= 2;
    }
    changed_ = sample;
    blend_.floor = -infinity;
    if (num_groups > std::max(wanted_, code_.few_groups)) {
      blend_.floor = wanted_error(blend_.weight, blend_.taken, num_groups, sample);
    }
    std::fill(blend_.slots.begin(), blend_.slots.end(), -1);
    blend_.lanes.count = 0;
    for (std::size_t group = 0; group < num_groups; ++group) {
      if (blend_.taken[group] < infinity) {
        place(group, sample / block_size);
      }
    }
    pad();
  }

  void raise_floor(std::int64_t block) {
    Lanes& lanes = blend_.lanes;
    const double raised =
        wanted_error(lanes.weight, lanes.taken, lanes.count, block * block_size);
    blend_.floor = std::max(blend_.floor, raised);
    const std::size_t count = std::exchange(lanes.count, 0);
    for (std::size_t lane = 0; lane < count; ++lane) {
      place(lanes.group(lane), block);
    }
  }

  std::size_t since_change(std::int64_t sample) const {
    return static_cast<std::size_t>(sample - changed_) * wanted_;
  }

  // The error of rank `wanted_`, the largest one being the first.
  double wanted_error(const std::vector<double>& weight, const std::vector<double>& taken,
                      std::size_t count, std::int64_t sample) {
    for (std::size_t i = 0; i < count; ++i) {
      errors_[i] = error_of(weight[i], sample, taken[i]);
    }
    const auto place = errors_.begin() + static_cast<std::ptrdiff_t>(wanted_ - 1);
    std::nth_element(errors_.begin(), place, errors_.begin() + static_cast<std::ptrdiff_t>(count),
                     std::greater<>());
    return *place;
  }

  // Into the lanes or the calendar, at the beginning of `block` or in the midst of it.
  void place(std::size_t group, std::int64_t block) {
    const double weight = blend_.weight.data()[group];
    const double taken = blend_.taken.data()[group];
    if (error_of(weight, last_sample(block), taken) >= blend_.floor) {
      blend_.lanes.set(blend_.lanes.count++, weight, taken, group);
    } else {
      postpone(blend_, group, taken, block);
    }
  }

  void begin_block(std::int64_t block) {
    Lanes& lanes = blend_.lanes;
    // Whoever leaves is spent, or in the calendar already. Without a branch that none can foresee.
    std::size_t kept = 0;
    for (std::size_t lane = 0; lane < lanes.count; ++lane) {
      const double weight = lanes.weight.data()[lane];
      const double taken = lanes.taken.data()[lane];
      lanes.set(kept, weight, taken, lanes.group(lane));
      kept += error_of(weight, last_sample(block), taken) >= blend_.floor ? 1 : 0;
    }
    lanes.count = kept;
    std::int32_t& head = blend_.slots[static_cast<std::size_t>(block) & (blend_.slots.size() - 1)];
    for (std::int32_t group = std::exchange(head, -1); group >= 0;) {
      const std::int32_t next = blend_.next.data()[group];
      place(static_cast<std::size_t>(group), block);
      group = next;
    }
    if (block % 4 == 0) {  // now and then: it costs as much as some samples
      const std::int64_t sample = block * block_size;
      if (wanted_ > fewest_wanted && since_change(sample) > 256 * blend_.groups.size()) {
        wanted_ /= 2;
        changed_ = sample;
      }
      if (lanes.count > wanted_ + crowd) {
        raise_floor(block);
      }
    }
    pad();
  }

  // Lanes that never win, up to a full step.
  void pad() {
    Lanes& lanes = blend_.lanes;
    for (std::size_t lane = lanes.count; lane % lane_step != 0; ++lane) {
      lanes.weight[lane] = 0;
      lanes.taken[lane] = infinity;
      lanes.tag[lane] = 0;
    }
  }

  Blend& blend_;
  Code code_;
  std::vector<double> errors_;
  std::size_t wanted_ = fewest_wanted;
  std::int64_t changed_ = 0;  // the sample at which `wanted_` was last thought over
};

// Draws `size` samples over the datasets whose limit is above 0.
void draw(std::span<const double> weights, std::span<const double> limits,
          std::span<std::int16_t> dataset_index, std::span<std::int64_t> dataset_sample_index) {
  Blend blend;
  blend.dataset_index = dataset_index.data();
  blend.dataset_sample_index = dataset_sample_index.data();
  const auto size = static_cast<std::int64_t>(dataset_index.size());

  std::vector<std::size_t> open;
  double largest_weight = 0;
  for (std::size_t dataset = 0; dataset < weights.size(); ++dataset) {
    if (limits[dataset] > 0) {
      open.push_back(dataset);
      largest_weight = std::max(largest_weight, weights[dataset]);
    }
  }
  const auto key = [&](std::size_t dataset) {
    return std::pair(weights[dataset], limits[dataset]);
  };
  std::vector<std::size_t> sorted = open;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](std::size_t left, std::size_t right) { return key(left) < key(right); });
  std::size_t num_groups = sorted.empty() ? 0 : 1;
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    num_groups += key(sorted[i]) != key(sorted[i - 1]) ? 1 : 0;
  }
  blend.turns =
      2 * num_groups <= open.size() && largest_weight * static_cast<double>(size) < 0x1p52;
  const std::vector<std::size_t>& members = blend.turns ? sorted : open;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto place = static_cast<std::int32_t>(i);
    blend.members.push_back(static_cast<std::int32_t>(members[i]));
    if (blend.turns && i > 0 && key(members[i]) == key(members[i - 1])) {
      blend.groups.back().end = place + 1;
    } else {
      blend.groups.push_back({limits[members[i]], place, place + 1, place});
      blend.weight.push_back(weights[members[i]]);
    }
  }
  blend.taken.resize(blend.groups.size());
  Blender(blend).draw(size);
}

}  // namespace

void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index) {
  const std::vector<double> limits(weights.size(), infinity);
  draw(weights, limits, dataset_index, dataset_sample_index);
}

void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index) {
  const auto total =
      static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  std::vector<double> weights, limits;
  for (const std::int64_t size : sizes) {
    weights.push_back(static_cast<double>(size) / total);
    limits.push_back(static_cast<double>(size));
  }
  draw(weights, limits, dataset_index, dataset_sample_index);
}

}  // namespace millrace
