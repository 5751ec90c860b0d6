// Draws several parts of a blend side by side, each by the greedy rule of blend.hpp from a start of
// its own: one part waits for the winner of each sample before it can look for the next, eight of
// them fill a vector.
//
// How a winner is found without looking at every group for every sample: by keeping those that can
// win at all, in two steps. A part's list holds the groups whose error reaches some floor by the
// end of a long block of samples; its column of the table, those of them whose error reaches a
// higher floor by the end of a block. In the table errors are computed and compared sample by
// sample, by the rule itself; if the largest one is not below the floor, it is the largest of all.
// If it is, the floor is lowered, and the list and the column are made anew.
//
// Where weights are nearly equal, errors differ by less than they grow by in a block. So most
// groups can win, and a part's column does not fit into the table. Such a part draws alone until
// its next long block: it looks at its whole list for each sample, at as many neighbours at a time
// as fill a vector.
//
// Why this is exact, for any weights: rounding is monotone, so as long as nothing is taken of a
// group the rounded product weight * n and the rounded difference to `taken` never fall as n grows,
// and they never rise as `taken` does. A group whose error, computed by the rule's own arithmetic,
// is below a floor at the last sample of a block is thus below it at every earlier one. Nothing
// depends on a bound on rounding errors, nor on weights that sum to 1; if they are far from it,
// only speed is lost. The floors are guesses: they follow the winners, by a margin that grows when
// one was too high and shrinks while none is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace millrace {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// What is drawn from: groups of datasets of equal weight and limit.
//
// The errors of a group's datasets are equal as long as as many samples were taken of each, so they
// take turns, in order, and what was `taken` of the group is the number of finished turns.
struct BlendGroups {
  std::vector<std::int32_t> members;  // datasets, those of a group together and ascending
  std::vector<std::int32_t> begin;    // of each group, in `members`; and the end of the last one
  std::vector<double> weight;         // of each group; padded with zeros
  std::vector<double> limit;          // what may be taken of each member of a group
  bool turns = false;                 // some group has several members
  bool limited = false;               // some limit is below infinity

  // Loops go over whole words of numbers: an array is padded with what never wins.
  static constexpr std::size_t word_size = 64;
  static constexpr std::size_t padded(std::size_t count) {
    return (count + word_size - 1) / word_size * word_size;
  }

  std::size_t size() const { return begin.size() - 1; }
  std::int64_t num_members(std::size_t group) const { return begin[group + 1] - begin[group]; }
};

// How many samples were drawn of each group: all that later samples depend on.
using Drawn = std::vector<std::int64_t>;

class BlendTeam {
 public:
  static constexpr std::size_t num_parts = 8;

  BlendTeam(const BlendGroups& groups, std::int16_t* dataset_index,
            std::int64_t* dataset_sample_index);

  // Puts a part at its start: `sample` is the first one that is drawn, `stop` follows the last.
  void start(std::size_t part, const Drawn& drawn, std::int64_t sample, std::int64_t stop);

  // Draws as many samples of each part, or up to where it stops.
  void run(std::int64_t num_samples);

  Drawn drawn(std::size_t part);

 private:
  friend struct BlendCode;  // what is done in vectors

  struct Part {
    std::int64_t sample = 0, stop = 0;               // the next one; what follows the last
    std::int64_t block_end = 0, long_block_end = 0;  // the samples that follow them
    std::int64_t pause = 0;                          // what follows those drawn in one go
    double floor = 0, list_floor = 0;
    double margin = 0, list_margin = 0;  // by how much they are set below `lowest_best`
    double lowest_best = 0;              // of the errors of the block's winners
    // What was taken of each group, infinity if it is spent: of those in the list, not up to date.
    std::vector<double> taken;
    std::vector<std::int32_t> turn;  // of each group, in `members`: whose turn it is
    // The list. Its arrays have room for all groups, most of which is never touched.
    std::size_t list_size = 0;
    std::unique_ptr<double[]> list_weight, list_taken;
    std::unique_ptr<std::int32_t[]> list_key, list_group, list_row;
    bool in_table = false;     // else it draws alone, or has stopped
    std::size_t num_rows = 0;  // that it has in the table
  };

  static constexpr std::size_t most_rows = 192;  // even; beyond them, drawing alone is faster

  // Of the table, which has a column for each part. An empty place has the error -infinity.
  struct alignas(64) Row {
    double weight[num_parts], taken[num_parts], error[num_parts], key[num_parts];

    Row() {
      for (std::size_t part = 0; part < num_parts; ++part) {
        clear(part);
      }
    }
    void clear(std::size_t part) {
      weight[part] = 0;
      taken[part] = key[part] = infinity;
    }
  };

  // Parts go by their number, candidates by their place in the part's list.
  void begin_block(std::size_t number);
  // For a sample whose largest error in the table is below the floor. Returns the winner's key.
  std::int32_t lower_floor(std::size_t number);
  // The same for the list. Returns the largest error of all.
  double lower_list_floor(std::size_t number);
  void leave_table(std::size_t number);
  // Counts a sample where there are turns or limits.
  void take(std::size_t number, std::size_t place, std::int32_t key);
  // Brings `taken` up to date with the list.
  void settle(Part& part) const;
  void count_rows(const Part& part);
  // What errors of neighbours differ by, about, if they lie in an interval of length 1.
  double spacing() const;

  const BlendGroups& groups_;
  std::int16_t* dataset_index_;
  std::int64_t* dataset_sample_index_;
  const struct BlendFunctions& functions_;
  std::array<Part, num_parts> parts_;
  std::array<Row, most_rows> table_;
  std::size_t num_rows_ = 0;  // the most that a part has, made even
};

}  // namespace millrace
