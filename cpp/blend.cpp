#include "blend.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>


namespace millrace {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t shortest_block = 16;
constexpr std::int64_t block_ratio = 4;
constexpr std::size_t fewest_wanted = 8;
constexpr std::size_t lane_step = 8;
constexpr std::size_t most_register_lanes = 64;
constexpr std::int64_t one_hit = std::int64_t{1} << 32;
constexpr int lane_shift = 16;

struct Group {
  double limit;
  std::int32_t begin, end;
  std::int32_t next;
};

struct Lanes {
  std::size_t count = 0;
  std::vector<double> weight, taken, error;
  std::vector<std::int64_t> tag;
};

struct Blend {
  std::vector<std::int32_t> members;
  std::vector<Group> groups;
  std::vector<double> weight, taken, error;
  bool grouped = false;
  Lanes lanes;
  double floor = -infinity;
  std::int16_t* dataset_index;
  std::int64_t* dataset_sample_index;
};

enum class End { stop, below_floor, spent };
struct Drawn {
  std::int64_t sample;
  End end;
};

template <std::size_t num_bytes>
struct Vectors {
  static constexpr std::size_t width = num_bytes / 8;
  typedef double Doubles __attribute__((vector_size(num_bytes), aligned(8), may_alias));
  typedef std::int64_t Integers __attribute__((vector_size(num_bytes), aligned(8), may_alias));
};

template <class Vector, class Half>
inline __attribute__((always_inline)) void split(const Vector& v, Half& low, Half& high) {
  __builtin_memcpy(&low, &v, sizeof low);
  __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
}

template <class V>
inline __attribute__((always_inline)) double largest_of(const typename V::Doubles& v) {
  if constexpr (V::width == 2) {
    const double a = v[0], b = v[1];
    return a > b ? a : b;
  } else {
    using H = Vectors<V::width * 4>;
    typename H::Doubles low, high;
    split(v, low, high);
    low = low > high ? low : high;
    return largest_of<H>(low);
  }
}
template <class V>
inline __attribute__((always_inline)) std::int64_t sum_of(const typename V::Integers& v) {
  if constexpr (V::width == 2) {
    return v[0] + v[1];
  } else {
    using H = Vectors<V::width * 4>;
    typename H::Integers low, high;
    split(v, low, high);
    low += high;
    return sum_of<H>(low);
  }
}

template <class V>
struct View {
  typename V::Doubles *weight, *taken, *error;
  typename V::Integers* tag;
  std::size_t count;
};

#define MILLRACE_INLINE inline __attribute__((always_inline))

double position_of(std::int64_t sample) { return static_cast<double>(std::max<std::int64_t>(sample, 1)); }

template <class V, bool count_hits>
MILLRACE_INLINE std::int64_t find(const View<V>& lanes, const Blend& blend, double position, double floor) {
  using Doubles = typename V::Doubles;
  using Integers = typename V::Integers;
  const Doubles one = Doubles{} + 1.0;
  Doubles largest = Doubles{} - infinity;
  for (std::size_t i = 0; i < lanes.count; ++i) {
    const Doubles error = lanes.weight[i] * position - lanes.taken[i];
    lanes.error[i] = error;
    largest = largest > error ? largest : error;
  }
  const double best = largest_of<V>(largest);
  if (best < floor) {
    return -1;
  }
  Integers tags = {};
  for (std::size_t i = 0; i < lanes.count; ++i) {
    tags += lanes.error[i] == best ? lanes.tag[i] : Integers{};
    if constexpr (count_hits) {
      lanes.taken[i] += lanes.error[i] == best ? one : Doubles{};
    }
  }
  std::int64_t tag = sum_of<V>(tags);
  if (__builtin_expect(tag < 2 * one_hit, 1)) {
    return tag;
  }
  std::int32_t first = std::numeric_limits<std::int32_t>::max();
  for (std::size_t i = 0; i < lanes.count; ++i) {
    const Doubles errors = lanes.error[i];
    const Integers candidates = lanes.tag[i];
    for (std::size_t k = 0; k < V::width; ++k) {
      if (errors[k] == best && candidates[k] != 0) {
        const Group& group = blend.groups[static_cast<std::uint16_t>(candidates[k])];
        const std::int32_t dataset = blend.members[static_cast<std::size_t>(group.next)];
        if (dataset < first) {
          first = dataset;
          tag = candidates[k];
        }
      }
    }
  }
  if constexpr (count_hits) {
    for (std::size_t i = 0; i < lanes.count; ++i) {
      const Doubles lost = lanes.tag[i] == tag ? Doubles{} : one;
      lanes.taken[i] -= lanes.error[i] == best ? lost : Doubles{};
    }
  }
  return tag;
}

template <class V, bool in_registers>
MILLRACE_INLINE Drawn draw_from(const View<V>& lanes, Blend& blend, std::int64_t sample, std::int64_t stop) {
  const double floor = blend.floor;
  const std::int32_t* members = blend.members.data();
  Group* groups = blend.groups.data();
  double* all_taken = blend.taken.data();
  for (; sample < stop; ++sample) {
    const std::int64_t tag = find<V, in_registers>(lanes, blend, position_of(sample), floor);
    if (tag < 0) {
      return {sample, End::below_floor};
    }
    const auto number = static_cast<std::uint16_t>(tag);
    Group& group = groups[number];
    const double taken = all_taken[number];
    blend.dataset_index[sample] = static_cast<std::int16_t>(members[group.next]);
    blend.dataset_sample_index[sample] = static_cast<std::int64_t>(taken);
    if constexpr (!in_registers) {
      if (++group.next < group.end) {
        continue;
      }
      group.next = group.begin;
      blend.lanes.taken.data()[static_cast<std::uint16_t>(tag >> lane_shift)] = taken + 1.0;
    }
    all_taken[number] = taken + 1.0;
    if (taken + 1.0 == group.limit) {
      all_taken[number] = infinity;
      return {sample + 1, End::spent};
    }
  }
  return {sample, End::stop};
}

template <class V, std::size_t num_lanes>
MILLRACE_INLINE Drawn draw_in_registers(const View<V>& memory, Blend& blend, std::int64_t sample, std::int64_t stop) {
  constexpr std::size_t count = num_lanes / V::width;
  if constexpr (num_lanes > lane_step) {
    if (memory.count < count) {
      return draw_in_registers<V, num_lanes - lane_step>(memory, blend, sample, stop);
    }
  }
  typename V::Doubles weight[count], taken[count], error[count];
  typename V::Integers tag[count];
  for (std::size_t i = 0; i < count; ++i) {
    weight[i] = memory.weight[i];
    taken[i] = memory.taken[i];
    tag[i] = memory.tag[i];
  }
  return draw_from<V, true>({weight, taken, error, tag, count}, blend, sample, stop);
}

template <class V>
MILLRACE_INLINE View<V> view_of(Lanes& lanes) {
  using Doubles = typename V::Doubles;
  return {reinterpret_cast<Doubles*>(lanes.weight.data()), reinterpret_cast<Doubles*>(lanes.taken.data()),
          reinterpret_cast<Doubles*>(lanes.error.data()), reinterpret_cast<typename V::Integers*>(lanes.tag.data()),
          (lanes.count + lane_step - 1) / lane_step * (lane_step / V::width)};
}

template <class V>
MILLRACE_INLINE Drawn draw_with(Blend& blend, std::int64_t sample, std::int64_t stop) {
  Lanes& lanes = blend.lanes;
  const View<V> memory = view_of<V>(lanes);
  if (blend.grouped || lanes.count > most_register_lanes) {
    return draw_from<V, false>(memory, blend, sample, stop);
  }
  if (lanes.count <= 2 * lane_step) {
    using N = Vectors<(V::width > 4 ? 4 : V::width) * 8>;
    return draw_in_registers<N, 2 * lane_step>(view_of<N>(lanes), blend, sample, stop);
  }
  return draw_in_registers<V, most_register_lanes>(memory, blend, sample, stop);
}

Drawn draw_portably(Blend& blend, std::int64_t sample, std::int64_t stop) {
  return draw_with<Vectors<16>>(blend, sample, stop);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) Drawn draw_with_avx2(Blend& blend, std::int64_t sample, std::int64_t stop) {
  return draw_with<Vectors<32>>(blend, sample, stop);
}
__attribute__((target("avx512f"))) Drawn draw_with_avx512(Blend& blend, std::int64_t sample, std::int64_t stop) {
  return draw_with<Vectors<64>>(blend, sample, stop);
}
#endif

auto* choose_draw() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    return &draw_with_avx512;
  }
  if (__builtin_cpu_supports("avx2")) {
    return &draw_with_avx2;
  }
#endif
  return &draw_portably;
}

struct Candidates {
  std::int64_t block;
  std::int64_t stop = 0;
  std::size_t count = 0;
  std::vector<std::int32_t> groups;
};

class Race {
 public:
  Race(Blend& blend, std::int64_t size) : blend_(blend), size_(size) {
    const std::size_t num_groups = blend.groups.size();
    const std::size_t num_lanes = (num_groups / lane_step + 1) * lane_step;
    for (auto* column : {&blend.lanes.weight, &blend.lanes.taken, &blend.lanes.error}) {
      column->resize(num_lanes);
    }
    blend.lanes.tag.resize(num_lanes);
    std::int64_t block = shortest_block;
    do {
      levels_.push_back({block, 0, 0, std::vector<std::int32_t>(num_groups + 1)});
      block *= block_ratio;
    } while (block * 2 <= static_cast<std::int64_t>(num_groups));
    errors_.resize(num_groups);
  }

  void run() {
    auto* draw = choose_draw();
    lower_floor(0);
    for (std::int64_t sample = 0; sample < size_;) {
      refine(sample);
      const Drawn drawn = draw(blend_, sample, std::min(levels_[0].stop, size_));
      sample = drawn.sample;
      if (drawn.end == End::below_floor) {
        lower_floor(sample);
      } else if (drawn.end == End::stop) {
        raise_floor(sample);
      }
    }
  }
  std::size_t builds = 0, lanesum = 0, epochs = 0;

 private:
  void refine(std::int64_t sample) {
    for (std::size_t k = levels_.size(); k-- > 0;) {
      Candidates& level = levels_[k];
      if (level.stop > sample) {
        continue;
      }
      level.stop = (sample / level.block + 1) * level.block;
      const double last = position_of(level.stop - 1);
      const double floor = blend_.floor;
      const double* weight = blend_.weight.data();
      const double* taken = blend_.taken.data();
      std::int32_t* kept = level.groups.data();
      std::size_t count = 0;
      if (k + 1 == levels_.size()) {
        double* errors = errors_.data();
        const std::size_t num = blend_.groups.size();
        for (std::size_t i = 0; i < num; ++i) {
          errors[i] = weight[i] * last - taken[i];
        }
        for (std::size_t i = 0; i < num; ++i) {
          kept[count] = static_cast<std::int32_t>(i);
          count += errors[i] >= floor ? 1 : 0;
        }
      } else {
        const Candidates& wider = levels_[k + 1];
        const std::int32_t* groups = wider.groups.data();
        const std::size_t num = wider.count;
        for (std::size_t i = 0; i < num; ++i) {
          const std::int32_t group = groups[i];
          kept[count] = group;
          count += weight[group] * last - taken[group] >= floor ? 1 : 0;
        }
      }
      level.count = count;
    }
    fill_lanes();
  }

  void fill_lanes() {
    const Candidates& level = levels_[0];
    const std::int32_t* groups = level.groups.data();
    Lanes& lanes = blend_.lanes;
    lanes.count = level.count;
    double* weight = lanes.weight.data();
    double* taken = lanes.taken.data();
    std::int64_t* tag = lanes.tag.data();
    const double* all_weight = blend_.weight.data();
    const double* all_taken = blend_.taken.data();
    std::size_t lane = 0;
    for (; lane < level.count; ++lane) {
      const std::int32_t group = groups[lane];
      weight[lane] = all_weight[group];
      taken[lane] = all_taken[group];
      tag[lane] = one_hit + static_cast<std::int64_t>(lane << lane_shift) + group;
    }
    for (; lane % lane_step != 0; ++lane) {
      weight[lane] = 0.0;
      taken[lane] = infinity;
      tag[lane] = 0;
    }
  }

  double wanted_error(const std::int32_t* groups, std::size_t count, std::int64_t sample) {
    const double position = position_of(sample);
    for (std::size_t i = 0; i < count; ++i) {
      const auto g = groups ? static_cast<std::size_t>(groups[i]) : i;
      errors_[i] = blend_.weight[g] * position - blend_.taken[g];
    }
    const auto place = errors_.begin() + static_cast<std::ptrdiff_t>(wanted_ - 1);
    std::nth_element(errors_.begin(), place, errors_.begin() + static_cast<std::ptrdiff_t>(count), std::greater<>());
    return *place;
  }

  void lower_floor(std::int64_t sample) {
    ++builds;
    const std::size_t num_groups = blend_.groups.size();
    if (sample > 0 && static_cast<std::size_t>(sample - changed_) * wanted_ < 32 * num_groups) {
      wanted_ *= 2;
    }
    changed_ = sample;
    blend_.floor = -infinity;
    if (num_groups > std::max(wanted_, std::size_t{16})) {
      blend_.floor = wanted_error(nullptr, num_groups, sample);
    }
    for (Candidates& level : levels_) {
      level.stop = sample;
    }
  }

  void raise_floor(std::int64_t sample) {
    if (blend_.floor == -infinity || sample % (4 * shortest_block) != 0) {
      return;
    }
    const Candidates& level = levels_[0];
    lanesum += level.count;
    ++epochs;
    if (wanted_ > fewest_wanted && static_cast<std::size_t>(sample - changed_) * wanted_ > 256 * blend_.groups.size()) {
      wanted_ /= 2;
      changed_ = sample;
    }
    if (level.count > wanted_ + 16) {
      blend_.floor = std::max(blend_.floor, wanted_error(level.groups.data(), level.count, sample));
    }
  }

  Blend& blend_;
  std::int64_t size_;
  std::vector<Candidates> levels_;
  std::vector<double> errors_;
  std::size_t wanted_ = fewest_wanted;
  std::int64_t changed_ = 0;
};

void blend_all(std::span<const double> weights, std::span<const std::int64_t> limits, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index) {
  Blend blend;
  blend.dataset_index = dataset_index.data();
  blend.dataset_sample_index = dataset_sample_index.data();
  auto limit = [&](std::int32_t d) { return limits.empty() ? infinity : static_cast<double>(limits[static_cast<std::size_t>(d)]); };
  auto key = [&](std::int32_t d) { return std::pair{weights[static_cast<std::size_t>(d)], limit(d)}; };
  double largest = 0;
  for (std::size_t d = 0; d < weights.size(); ++d) {
    if (limit(static_cast<std::int32_t>(d)) > 0) {
      blend.members.push_back(static_cast<std::int32_t>(d));
      largest = std::max(largest, weights[d]);
    }
  }
  std::vector<std::int32_t> sorted = blend.members;
  std::sort(sorted.begin(), sorted.end(), [&](auto left, auto right) { return std::pair{key(left), left} < std::pair{key(right), right}; });
  std::size_t num_groups = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    num_groups += i == 0 || key(sorted[i]) != key(sorted[i - 1]);
  }
  blend.grouped = sorted.size() > 16 && num_groups * 2 <= sorted.size() && largest * static_cast<double>(dataset_index.size()) < 0x1p52;
  if (blend.grouped) {
    blend.members = sorted;
  }
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const auto place = static_cast<std::int32_t>(i);
    if (blend.grouped && i > 0 && key(sorted[i]) == key(sorted[i - 1])) {
      blend.groups.back().end = place + 1;
    } else {
      blend.groups.push_back({limit(blend.members[i]), place, place + 1, place});
      blend.weight.push_back(weights[static_cast<std::size_t>(blend.members[i])]);
    }
  }
  blend.taken.resize(blend.groups.size());
  Race(blend, static_cast<std::int64_t>(dataset_index.size())).run();
}

}  // namespace

void blend_by_weights(std::span<const double> weights, std::span<std::int16_t> dataset_index,
                      std::span<std::int64_t> dataset_sample_index) {
  blend_all(weights, {}, dataset_index, dataset_sample_index);
}

void blend_by_sizes(std::span<const std::int64_t> sizes, std::span<std::int16_t> dataset_index,
                    std::span<std::int64_t> dataset_sample_index) {
  const auto total =
      static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  std::vector<double> weights;
  for (const std::int64_t size : sizes) {
    weights.push_back(static_cast<double>(size) / total);
  }
  blend_all(weights, sizes, dataset_index, dataset_sample_index);
}

}  // namespace millrace
