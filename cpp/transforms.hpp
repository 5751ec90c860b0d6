// Transforms of samples. The samples of a batch are one run of tokens: sample i ends at ends[i], where
// the next one starts, and the last one at the end of the tokens. Each function throws
// std::invalid_argument for arrays that do not fit each other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "column.hpp"

namespace millrace {

using SampleEnds = std::span<const std::int64_t>;
using Flags = std::span<const std::uint8_t>;

struct FillInMiddle {
  double rate;      // share of documents that are permuted
  double spm_rate;  // share of these in the order suffix, prefix, middle
  std::int64_t prefix_token;
  std::int64_t middle_token;
  std::int64_t suffix_token;
  std::optional<std::int64_t> eod_token;
  std::optional<std::int64_t> pad_token;
  std::uint64_t seed;
};

// A document of which fewer tokens would remain is not permuted.
inline constexpr std::int64_t min_fim_tokens = 3;

// Writes each sample with some of its documents permuted, and the old place of each token: -1 for
// those that are inserted. The rule is that of `millrace.FillInMiddle`.
void fill_in_middle(std::span<const std::int64_t> tokens, SampleEnds ends,
                    std::span<const std::int64_t> sample_numbers, const FillInMiddle& options,
                    std::span<std::int64_t> tokens_out, std::span<std::int64_t> take_out);

// Marks the tokens of runs in which 1 to max_period tokens repeat at least min_repeats times, with 1;
// with is_whole, all tokens of a sample that has such a run. min_repeats is at least 2.
void mark_repeats(std::span<const std::int64_t> tokens, SampleEnds ends, std::int64_t max_period,
                  std::int64_t min_repeats, bool is_whole, std::span<std::uint8_t> marks);

// Marks the tokens of spans (of `counts` tokens of a sequence, from `offsets` on) that lie in ranges,
// with 1. A range is three numbers: sequence, start and stop; ranges are sorted, without overlap, and
// may be mapped.
void mark_ranges(Column<std::int32_t> ranges, std::span<const std::int64_t> sequences,
                 std::span<const std::int64_t> offsets, std::span<const std::int64_t> counts,
                 std::span<std::uint8_t> marks);

// The number of tokens of some spans.
std::int64_t sum_of_counts(std::span<const std::int64_t> counts);

// Writes the loss masks of rows of `length` labels, one row for each sample, with 0 where the label's
// flag is 0. Label k of a row is token k + 1 of its sample.
void mask_losses(std::span<const float> loss_masks, std::int64_t length, Flags flags,
                 SampleEnds ends, std::span<float> out);

}  // namespace millrace
