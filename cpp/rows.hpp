// Samples as rows of a batch: tokens, labels, loss mask and position ids.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "column.hpp"
#include "tokens.hpp"

namespace millrace {

// What a sample looks like: see `millrace.options.SampleOptions`, which has the same fields.
struct SampleOptions {
  std::int64_t sequence_length;
  bool add_extra_token;
  std::optional<std::int64_t> eod_token;
  std::optional<std::int64_t> pad_token;
  bool reset_position_ids;
  bool eod_mask_loss;

  // Tokens of a sample, at most.
  std::int64_t capacity() const noexcept { return sequence_length + (add_extra_token ? 1 : 0); }
};

// One row of a batch; each array holds sequence_length numbers, and the next row follows it.
struct SampleRow {
  std::int64_t* tokens;
  std::int64_t* labels;
  float* loss_mask;
  std::int64_t* position_ids;

  SampleRow operator+(std::int64_t count) const noexcept {
    return {tokens + count, labels + count, loss_mask + count, position_ids + count};
  }
};

// A piece in memory: `count` bytes.
struct Run {
  const std::uint8_t* bytes;
  std::int64_t count;
};

// Prefetches a run's tokens.
void prefetch_run(const Run& run) noexcept;

// Fills a row with the tokens of its runs, padded and masked; `tokens` gives their type. What the
// runs lack is filled with the pad token; where there is none, with 0, which is masked and does not
// count as a token. `next_runs` are read next: they are prefetched while this row is filled.
void fill_row(const Tokens& tokens, std::span<const Run> runs, std::span<const Run> next_runs,
              const SampleOptions& options, const SampleRow& row);

// Fills rows with tokens that lie one after the other: row i has the tokens from where the row before
// it ends up to ends[i]. Throws std::invalid_argument for a row that does not fit.
void fill_rows(const Tokens& tokens, std::int64_t num_tokens, Column<std::int64_t> ends,
               const SampleOptions& options, const SampleRow& first_row);

}  // namespace millrace
