#include "blend_team.hpp"

#include <algorithm>
#include <bit>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MILLRACE_X86_MASKS
#include <immintrin.h>
#endif

// What is called by code for one kind of processor must become part of it.
#define MILLRACE_INLINE inline __attribute__((always_inline))

namespace millrace {
namespace {

constexpr double no_floor = std::numeric_limits<double>::lowest();  // what can be drawn reaches it

// Blends of 64, 512 and 4,096 datasets take the least time about here.
constexpr std::int64_t block_size = 24, long_block_size = 144;  // samples
constexpr std::size_t few_groups = 24;   // so few are all in the table, and blocks have no end
constexpr std::size_t few_listed = 192;  // the same for the list and long blocks
constexpr std::size_t many_rows = 16, many_listed = 256;  // beyond them, margins shrink faster

// A candidate's key is (dataset << 16) + its place in the list; in the table it is float64, as
// errors are. The smallest key of those with the largest error is that of the first dataset.
constexpr int place_bits = 16;

MILLRACE_INLINE std::int32_t key_of(std::int32_t dataset, std::size_t place) {
  return (dataset << place_bits) + static_cast<std::int32_t>(place);
}

MILLRACE_INLINE double position_of(std::int64_t sample) {
  return static_cast<double>(std::max<std::int64_t>(sample, 1));
}

// What a margin becomes at the end of a block without a failure. A failure, which doubles it, costs
// as much as many rows do in a block, but not as much as hundreds of them.
double shrink(std::size_t count, std::size_t many) {
  const double excess = static_cast<double>(count) / static_cast<double>(many) - 1;
  return std::max(0.5, 0.95 - 0.05 * std::max(0.0, excess));
}

}  // namespace

struct BlendFunctions {
  void (*draw)(BlendTeam& team, std::int64_t num_samples);
  void (*draw_alone)(BlendTeam& team, std::size_t number);
  void (*fill_list)(BlendTeam& team, std::size_t number);
  void (*fill_table)(BlendTeam& team, std::size_t number);
  double (*largest_error)(const double* weight, const double* taken, std::size_t count,
                          std::int64_t sample);
  std::int32_t (*find_winner)(const BlendTeam& team, std::size_t number, double best);
};

// By vectors of `width` numbers. The loops over arrays go over whole words of 64 numbers.
struct BlendCode {
  template <std::size_t width>
  struct Vectors {
    // By typedef: in an alias, GCC drops the attributes.
    typedef double Aligned __attribute__((vector_size(width * 8), may_alias));
    typedef double Doubles __attribute__((vector_size(width * 8), aligned(8), may_alias));
  };

  template <std::size_t width>
  static MILLRACE_INLINE double largest_error(const double* weight, const double* taken,
                                              std::size_t count, std::int64_t sample) {
    using Doubles = typename Vectors<width>::Doubles;
    const double position = position_of(sample);
    Doubles largest = Doubles{} - infinity;
    for (std::size_t i = 0; i < BlendGroups::padded(count); i += width) {
      const Doubles error = *reinterpret_cast<const Doubles*>(weight + i) * position -
                            *reinterpret_cast<const Doubles*>(taken + i);
      largest = error > largest ? error : largest;
    }
    double result = largest[0];
    for (std::size_t i = 1; i < width; ++i) {
      result = std::max(result, static_cast<double>(largest[i]));
    }
    return result;
  }

  // Bit i: whether errors[i] reaches the floor.
  template <std::size_t width>
  static MILLRACE_INLINE std::uint64_t reaching(const typename Vectors<width>::Aligned& errors,
                                                double floor) {
    const typename Vectors<width>::Aligned floors = typename Vectors<width>::Aligned{} + floor;
#ifdef MILLRACE_X86_MASKS
    // Not by the intrinsics' names, which only functions for one kind of processor may call.
    if constexpr (width == 8) {
      constexpr int all = 0xff, no_rounding = _MM_FROUND_CUR_DIRECTION;
      return __builtin_ia32_cmppd512_mask(errors, floors, _CMP_GE_OS, all, no_rounding);
    } else if constexpr (width == 4) {
      return static_cast<unsigned>(__builtin_ia32_movmskpd256(errors >= floors));
    } else if constexpr (width == 2) {
      return static_cast<unsigned>(__builtin_ia32_movmskpd(errors >= floors));
    }
#endif
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < width; ++i) {
      bits |= static_cast<std::uint64_t>(errors[i] >= floors[i]) << i;
    }
    return bits;
  }

  // Calls take(i), in order, for each i < count whose error at `sample` reaches the floor.
  template <std::size_t width, class Take>
  static MILLRACE_INLINE void sift(const double* weight, const double* taken, std::size_t count,
                                   std::int64_t sample, double floor, Take take) {
    using Doubles = typename Vectors<width>::Doubles;
    const double position = position_of(sample);
    for (std::size_t start = 0; start < count; start += BlendGroups::word_size) {
      std::uint64_t found = 0;
      for (std::size_t i = 0; i < BlendGroups::word_size; i += width) {
        const typename Vectors<width>::Aligned error =
            *reinterpret_cast<const Doubles*>(weight + start + i) * position -
            *reinterpret_cast<const Doubles*>(taken + start + i);
        found |= reaching<width>(error, floor) << i;
      }
      for (; found != 0; found &= found - 1) {
        take(start + static_cast<std::size_t>(std::countr_zero(found)));
      }
    }
  }

  // The key of the first dataset in a part's list with the largest error, `best`.
  template <std::size_t width>
  static MILLRACE_INLINE std::int32_t find_winner(const BlendTeam& team, std::size_t number,
                                                  double best) {
    const BlendTeam::Part& part = team.parts_[number];
    std::int32_t key = std::numeric_limits<std::int32_t>::max();
    sift<width>(part.list_weight.get(), part.list_taken.get(), part.list_size, part.sample, best,
                [&](std::size_t place) __attribute__((always_inline)) {
                  key = std::min(key, part.list_key[place]);
                });
    return key;
  }

  // Makes a part's list, for the rest of its long block.
  template <std::size_t width>
  static MILLRACE_INLINE void fill_list(BlendTeam& team, std::size_t number) {
    BlendTeam::Part& part = team.parts_[number];
    const BlendGroups& groups = team.groups_;
    const double* weight = groups.weight.data();
    const double* taken = part.taken.data();
    const std::int32_t* members = groups.members.data();
    const std::int32_t* turn = groups.turns ? part.turn.data() : groups.begin.data();
    std::size_t count = 0;
    sift<width>(weight, taken, groups.size(), part.long_block_end - 1, part.list_floor,
                [&](std::size_t group) __attribute__((always_inline)) {
                  const std::size_t place = count++;
                  part.list_weight[place] = weight[group];
                  part.list_taken[place] = taken[group];
                  part.list_key[place] = key_of(members[turn[group]], place);
                  part.list_group[place] = static_cast<std::int32_t>(group);
                });
    part.list_size = count;
    for (std::size_t place = count; place < BlendGroups::padded(count); ++place) {
      part.list_weight[place] = 0;
      part.list_taken[place] = infinity;
    }
  }

  // Makes a part's column of the table, for the rest of its block, if it fits.
  template <std::size_t width>
  static MILLRACE_INLINE void fill_table(BlendTeam& team, std::size_t number) {
    BlendTeam::Part& part = team.parts_[number];
    BlendTeam::Row* table = team.table_.data();
    std::size_t count = 0;
    sift<width>(part.list_weight.get(), part.list_taken.get(), part.list_size, part.block_end - 1,
                part.floor, [&](std::size_t place) __attribute__((always_inline)) {
                  if (count < BlendTeam::most_rows) {
                    BlendTeam::Row& row = table[count];
                    row.weight[number] = part.list_weight[place];
                    row.taken[number] = part.list_taken[place];
                    row.key[number] = part.list_key[place];
                    part.list_row[place] = static_cast<std::int32_t>(count);
                  }
                  ++count;
                });
    const std::size_t num_rows = std::min(count, BlendTeam::most_rows);
    for (std::size_t row = num_rows; row < part.num_rows; ++row) {
      table[row].clear(number);
    }
    part.num_rows = num_rows;
    part.in_table = true;
    if (count > BlendTeam::most_rows) {
      team.leave_table(number);
    }
  }

  // Draws as many samples of each part that is in the table, all of its present block, but no more
  // of one that leaves it. Leaves the table without the last winners: the next block makes it anew.
  template <std::size_t width>
  static MILLRACE_INLINE void draw(BlendTeam& team, std::int64_t num_samples) {
    using Doubles = typename Vectors<width>::Aligned;
    constexpr std::size_t num_parts = BlendTeam::num_parts;
    const bool is_plain = !team.groups_.turns && !team.groups_.limited;
    alignas(64) double samples[num_parts], best[num_parts], lowest[num_parts], keys[num_parts];
    for (std::size_t i = 0; i < num_parts; ++i) {
      samples[i] = static_cast<double>(team.parts_[i].sample);
      lowest[i] = infinity;
      keys[i] = -1;  // of the last winner
    }
    for (; num_samples > 0; --num_samples) {
      BlendTeam::Row* table = team.table_.data();
      const std::size_t num_rows = team.num_rows_;
      for (std::size_t piece = 0; piece < num_parts; piece += width) {
        const auto at = [piece](double* values) __attribute__((always_inline)) {
          return reinterpret_cast<Doubles*>(values + piece);
        };
        const Doubles one = Doubles{} + 1.0, none = Doubles{} + infinity;
        const Doubles position = *at(samples) > one ? *at(samples) : one;
        const Doubles winner = *at(keys);
        *at(samples) += one;
        // Two rows at a time: one chain of maxima would take longer than the rest.
        Doubles largest[2] = {-none, -none};
        for (std::size_t row = 0; row < num_rows; row += 2) {
          for (std::size_t i = 0; i < 2; ++i) {
            // Counting the last winner here, in whole vectors, spares the wait for a load from
            // where a single number was just stored.
            BlendTeam::Row& candidates = table[row + i];
            const Doubles taken =
                *at(candidates.key) == winner ? *at(candidates.taken) + one : *at(candidates.taken);
            const Doubles error = *at(candidates.weight) * position - taken;
            *at(candidates.taken) = taken;
            *at(candidates.error) = error;
            largest[i] = error > largest[i] ? error : largest[i];
          }
        }
        const Doubles top = largest[0] > largest[1] ? largest[0] : largest[1];
        *at(best) = top;
        *at(lowest) = *at(lowest) < top ? *at(lowest) : top;
        Doubles first[2] = {none, none};
        for (std::size_t row = 0; row < num_rows; row += 2) {
          for (std::size_t i = 0; i < 2; ++i) {
            BlendTeam::Row& candidates = table[row + i];
            const Doubles key = *at(candidates.error) == top ? *at(candidates.key) : none;
            first[i] = key < first[i] ? key : first[i];
          }
        }
        *at(keys) = first[0] < first[1] ? first[0] : first[1];
      }
      for (std::size_t number = 0; number < num_parts; ++number) {
        BlendTeam::Part& part = team.parts_[number];
        if (!part.in_table) {
          continue;
        }
        if (__builtin_expect(best[number] < part.floor, 0)) {
          keys[number] = team.lower_floor(number);
          lowest[number] = part.lowest_best;
        }
        record(team, number, static_cast<std::int32_t>(keys[number]), is_plain);
      }
    }
    for (std::size_t number = 0; number < num_parts; ++number) {
      team.parts_[number].lowest_best = lowest[number];
    }
  }

  // Draws the samples of a part up to its pause by a look at its whole list for each.
  template <std::size_t width>
  static MILLRACE_INLINE void draw_alone(BlendTeam& team, std::size_t number) {
    BlendTeam::Part& part = team.parts_[number];
    const bool is_plain = !team.groups_.turns && !team.groups_.limited;
    part.lowest_best = infinity;
    while (part.sample < part.pause) {
      double best = largest_error<width>(part.list_weight.get(), part.list_taken.get(),
                                         part.list_size, part.sample);
      if (__builtin_expect(best < part.list_floor, 0)) {
        best = team.lower_list_floor(number);
      }
      part.lowest_best = std::min(part.lowest_best, best);
      record(team, number, find_winner<width>(team, number, best), is_plain);
    }
  }

 private:
  // Notes what a part's next sample is drawn from.
  static MILLRACE_INLINE void record(BlendTeam& team, std::size_t number, std::int32_t key,
                                     bool is_plain) {
    BlendTeam::Part& part = team.parts_[number];
    const auto place = static_cast<std::size_t>(key & ((1 << place_bits) - 1));
    const double taken = part.list_taken[place];
    team.dataset_index_[part.sample] = static_cast<std::int16_t>(key >> place_bits);
    team.dataset_sample_index_[part.sample] = static_cast<std::int64_t>(taken);
    ++part.sample;
    if (is_plain) {
      part.list_taken[place] = taken + 1.0;
    } else {
      team.take(number, place, key);
    }
  }
};

namespace {

#define MILLRACE_BLEND_FUNCTIONS(name, width, target)                                            \
  struct name {                                                                                  \
    target static void draw(BlendTeam& team, std::int64_t num_samples) {                         \
      BlendCode::draw<width>(team, num_samples);                                                 \
    }                                                                                            \
    target static void draw_alone(BlendTeam& team, std::size_t number) {                         \
      BlendCode::draw_alone<width>(team, number);                                                \
    }                                                                                            \
    target static void fill_list(BlendTeam& team, std::size_t number) {                          \
      BlendCode::fill_list<width>(team, number);                                                 \
    }                                                                                            \
    target static void fill_table(BlendTeam& team, std::size_t number) {                         \
      BlendCode::fill_table<width>(team, number);                                                \
    }                                                                                            \
    target static double largest_error(const double* weight, const double* taken,                \
                                       std::size_t count, std::int64_t sample) {                 \
      return BlendCode::largest_error<width>(weight, taken, count, sample);                      \
    }                                                                                            \
    target static std::int32_t find_winner(const BlendTeam& team, std::size_t number,            \
                                           double best) {                                        \
      return BlendCode::find_winner<width>(team, number, best);                                  \
    }                                                                                            \
    static constexpr BlendFunctions functions = {draw,       draw_alone,    fill_list,           \
                                                 fill_table, largest_error, find_winner};        \
  };

MILLRACE_BLEND_FUNCTIONS(Portable, 2, )
#ifdef __x86_64__
MILLRACE_BLEND_FUNCTIONS(Avx2, 4, __attribute__((target("avx2"))))
MILLRACE_BLEND_FUNCTIONS(Avx512, 8, __attribute__((target("avx512f,avx512vl,avx512dq"))))
#endif

// What this machine can do.
const BlendFunctions& choose_functions() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return Avx512::functions;
  }
  if (__builtin_cpu_supports("avx2")) {
    return Avx2::functions;
  }
#endif
  return Portable::functions;
}

}  // namespace

BlendTeam::BlendTeam(const BlendGroups& groups, std::int16_t* dataset_index,
                     std::int64_t* dataset_sample_index)
    : groups_(groups),
      dataset_index_(dataset_index),
      dataset_sample_index_(dataset_sample_index),
      functions_(choose_functions()) {}

void BlendTeam::start(std::size_t number, const Drawn& drawn, std::int64_t sample,
                      std::int64_t stop) {
  Part& part = parts_[number];
  part.sample = part.long_block_end = sample;
  part.stop = stop;
  part.margin = part.list_margin = 8 * spacing();
  const std::size_t room = BlendGroups::padded(groups_.size());
  if (part.taken.empty()) {
    part.taken.assign(room, infinity);
    part.turn.resize(groups_.turns ? groups_.size() : 0);
    for (auto* array : {&part.list_weight, &part.list_taken}) {
      *array = std::make_unique_for_overwrite<double[]>(room);
    }
    for (auto* array : {&part.list_key, &part.list_group, &part.list_row}) {
      *array = std::make_unique_for_overwrite<std::int32_t[]>(room);
    }
  }
  part.list_size = 0;  // nothing to settle
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const std::int64_t num_members = groups_.num_members(group);
    const auto taken = static_cast<double>(drawn[group] / num_members);
    part.taken[group] = taken == groups_.limit[group] ? infinity : taken;
    if (groups_.turns) {
      part.turn[group] =
          groups_.begin[group] + static_cast<std::int32_t>(drawn[group] % num_members);
    }
  }
  part.lowest_best = functions_.largest_error(groups_.weight.data(), part.taken.data(),
                                              groups_.size(), sample);
}

Drawn BlendTeam::drawn(std::size_t number) {
  Part& part = parts_[number];
  settle(part);
  Drawn result(groups_.size());
  for (std::size_t group = 0; group < result.size(); ++group) {
    const double taken = std::min(part.taken[group], groups_.limit[group]);
    result[group] = static_cast<std::int64_t>(taken) * groups_.num_members(group);
    if (groups_.turns) {
      result[group] += part.turn[group] - groups_.begin[group];
    }
  }
  return result;
}

void BlendTeam::run(std::int64_t num_samples) {
  while (num_samples > 0) {
    std::int64_t steps = num_samples;
    bool is_done = true, uses_table = false;
    num_rows_ = 0;
    for (std::size_t number = 0; number < num_parts; ++number) {
      Part& part = parts_[number];
      if (part.sample < part.stop) {
        is_done = false;
        begin_block(number);
        uses_table |= part.in_table;
        count_rows(part);
        steps = std::min({steps, part.block_end - part.sample, part.stop - part.sample});
      }
    }
    if (is_done) {
      return;
    }
    for (Part& part : parts_) {
      part.pause = std::min(part.sample + steps, part.stop);
    }
    if (uses_table) {
      functions_.draw(*this, steps);
    }
    for (std::size_t number = 0; number < num_parts; ++number) {
      Part& part = parts_[number];
      if (part.sample < part.pause) {
        functions_.draw_alone(*this, number);
      }
      if (part.sample == part.stop) {
        leave_table(number);
      }
    }
    num_samples -= steps;
  }
}

void BlendTeam::begin_block(std::size_t number) {
  Part& part = parts_[number];
  if (part.sample == part.long_block_end) {
    settle(part);
    static_assert(few_listed <= most_rows);  // no part draws alone for ever
    if (groups_.size() <= few_listed) {
      part.long_block_end = part.stop;
      part.list_floor = no_floor;
    } else {
      part.long_block_end = part.sample + long_block_size;
      part.list_margin *= shrink(part.list_size, many_listed);
      part.list_floor = part.lowest_best - part.list_margin;
    }
    functions_.fill_list(*this, number);
  } else if (!part.in_table) {  // it draws alone
    part.block_end = part.long_block_end;
    return;
  }
  if (groups_.size() <= few_groups) {
    part.block_end = part.stop;
    part.floor = no_floor;
  } else {
    part.block_end = std::min(part.sample + block_size, part.long_block_end);
    part.margin *= shrink(part.num_rows, many_rows);
    part.floor = std::max(part.lowest_best - part.margin, part.list_floor);
  }
  functions_.fill_table(*this, number);
}

std::int32_t BlendTeam::lower_floor(std::size_t number) {
  Part& part = parts_[number];
  double best = functions_.largest_error(part.list_weight.get(), part.list_taken.get(),
                                         part.list_size, part.sample);
  if (best < part.list_floor) {
    best = lower_list_floor(number);
  }
  part.margin = 2 * part.margin + spacing();
  part.floor = std::max(best - part.margin, part.list_floor);
  part.lowest_best = best;
  functions_.fill_table(*this, number);
  count_rows(part);
  return functions_.find_winner(*this, number, best);
}

double BlendTeam::lower_list_floor(std::size_t number) {
  Part& part = parts_[number];
  settle(part);
  const double best = functions_.largest_error(groups_.weight.data(), part.taken.data(),
                                               groups_.size(), part.sample);
  part.list_margin = 2 * part.list_margin + spacing();
  part.list_floor = best - part.list_margin;
  functions_.fill_list(*this, number);
  return best;
}

void BlendTeam::leave_table(std::size_t number) {
  Part& part = parts_[number];
  part.in_table = false;
  for (; part.num_rows > 0; --part.num_rows) {
    table_[part.num_rows - 1].clear(number);
  }
}

void BlendTeam::take(std::size_t number, std::size_t place, std::int32_t key) {
  Part& part = parts_[number];
  const auto group = static_cast<std::size_t>(part.list_group[place]);
  Row* row = part.in_table ? &table_[static_cast<std::size_t>(part.list_row[place])] : nullptr;
  double taken = part.list_taken[place] + 1.0;
  if (groups_.turns) {
    std::int32_t& turn = part.turn[group];
    const bool is_finished = ++turn == groups_.begin[group + 1];
    if (is_finished) {
      turn = groups_.begin[group];
    }
    const std::int32_t next_key = key_of(groups_.members[static_cast<std::size_t>(turn)], place);
    if (next_key != key) {
      // `draw` finds the winner in the table by its key, and no longer will.
      part.list_key[place] = next_key;
      if (row != nullptr) {
        row->key[number] = next_key;
        row->taken[number] += is_finished ? 1.0 : 0.0;
      }
    }
    if (!is_finished) {
      return;
    }
  }
  if (taken == groups_.limit[group]) {
    taken = infinity;
    if (row != nullptr) {
      row->taken[number] = infinity;
    }
  }
  part.list_taken[place] = taken;
}

void BlendTeam::settle(Part& part) const {
  for (std::size_t place = 0; place < part.list_size; ++place) {
    part.taken[static_cast<std::size_t>(part.list_group[place])] = part.list_taken[place];
  }
}

void BlendTeam::count_rows(const Part& part) {
  num_rows_ = std::max(num_rows_, (part.num_rows + 1) / 2 * 2);
}

double BlendTeam::spacing() const { return 1.0 / static_cast<double>(groups_.size()); }

}  // namespace millrace
