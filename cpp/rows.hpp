// Samples as rows of a batch: tokens, labels, loss masks and position ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

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

enum class TokenType { int64, int32, file };

// Which arrays are written, and how: the arguments of `RowForm` in Python, but for the dtype of tokens and
// labels, which is a name there ("int64", "int32" or "file").
struct RowForm {
  bool tokens = true;
  bool labels = true;
  bool loss_mask = true;
  bool position_ids = true;
  bool parts = false;  // the spans of the samples are returned too
  TokenType token_type = TokenType::int64;
  bool share_labels = false;  // tokens and labels are views of rows of one token more
  std::optional<std::int64_t> vocab_size;
};

// A piece in memory: `count` bytes.
struct Run {
  const std::uint8_t* bytes;
  std::int64_t count;
};

// The tokens of some samples: those of sample i are the runs bounds[i] up to bounds[i + 1], of the
// type types[i].
struct TokenRuns {
  std::vector<Run> runs;
  std::vector<std::size_t> bounds;
  std::vector<Tokens> types;

  std::size_t size() const noexcept { return types.size(); }
  std::span<const Run> of(std::size_t sample) const noexcept {
    return std::span(runs).subspan(bounds[sample], bounds[sample + 1] - bounds[sample]);
  }
  std::int64_t num_tokens(std::size_t sample) const noexcept;
};

// A token id outside its limits, [least, limit).
struct BadToken {
  std::size_t sample;
  std::int64_t place;  // in the sample
  std::int64_t id;
  std::int64_t least;
  std::int64_t limit;
};

// Where the arrays of a batch start; null: not written. Those of tokens are of type `type`, and
// their rows are `stride` tokens apart; those of the others, sequence_length numbers.
struct RowArrays {
  Tokens type;
  std::uint8_t* tokens = nullptr;
  std::uint8_t* labels = nullptr;
  std::int64_t stride = 0;
  float* loss_mask = nullptr;
  std::int64_t* position_ids = nullptr;
};

// Prefetches a run's tokens.
void prefetch_run(const Run& run) noexcept;

// Splits tokens into samples: sample i ends before token ends[i]. Throws std::invalid_argument for ends
// that go backwards or beyond the tokens.
void split_samples(const Tokens& tokens, std::int64_t num_tokens, Column<std::int64_t> ends,
                   TokenRuns& samples);

// Reads the samples where the options and the form demand it, and notes whether one has a pad token.
// Returns the first token whose id does not fit. Throws std::invalid_argument for a sample that does
// not fit its row, and for samples of several types where the form asks for the type of the file.
std::optional<BadToken> survey_samples(const TokenRuns& samples, const SampleOptions& options,
                                     const RowForm& form, bool& has_pads);

// Writes one row for each sample, padded and masked. What a sample lacks is 0, masked, and counts as a
// pad token; where there is no pad token, it does not count as a token.
void write_rows(const TokenRuns& samples, const SampleOptions& options, bool has_pads,
                const RowArrays& arrays);

// Ends labels, losses and position ids of written rows with the parts of the samples, which start at
// tokens `part_starts`; sample i ends before token ends[i]. Padding is a part of its own. Throws
// std::invalid_argument for starts that do not ascend, or of which none is a sample's first token.
void cut_at_parts(Column<std::int64_t> part_starts, Column<std::int64_t> ends, std::int64_t length,
                  const RowArrays& arrays);

// Writes the tokens of all samples, one sample after the other, in a type that holds them, and where
// each sample ends.
void write_samples(const TokenRuns& samples, const Tokens& type, std::uint8_t* tokens,
                   std::span<std::int64_t> ends);

}  // namespace millrace
