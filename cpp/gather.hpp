// Samples' tokens, labels, loss masks and position ids, straight from the token file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "ragged.hpp"

namespace millrace {

// The integer types that token files hold.
using Tokens = std::variant<const std::uint8_t*, const std::int8_t*, const std::int16_t*,
                            const std::uint16_t*, const std::int32_t*, const std::int64_t*>;

// One dataset's arrays: its token file and the three indices of a GPT dataset.
struct SampleSource {
  Tokens tokens;
  std::int64_t num_bytes;  // of the token file
  std::span<const std::int64_t> sequence_pointers;
  std::span<const std::int32_t> sequence_lengths;
  std::span<const std::int32_t> document_index;
  std::variant<std::span<const std::int32_t>, std::span<const std::int64_t>> sample_index;
  std::variant<std::span<const std::uint32_t>, std::span<const std::int64_t>> shuffle_index;

  std::int64_t num_samples() const noexcept;
};

struct SampleOptions {
  std::int64_t sequence_length;
  bool add_extra_token;
  std::int64_t pad_token;  // labels with this value are masked; -1 where no token is meant
  std::int64_t eod_token;  // used by the two switches below alone
  bool reset_position_ids;
  bool eod_mask_loss;
};

// One row of a batch; each array holds sequence_length numbers, and the next row follows it.
struct SampleRow {
  std::int64_t* tokens;
  std::int64_t* labels;
  float* loss_mask;
  std::int64_t* position_ids;
};

// Appends the pieces of the token file that make up sample `sample_number`, in bytes.
// Throws std::invalid_argument where the indices point outside their arrays or the token file.
void find_pieces(const SampleSource& source, std::int64_t sample_number,
                 const SampleOptions& options, std::vector<Piece>& pieces);

// A piece in memory: `count` bytes.
struct Run {
  const unsigned char* bytes;
  std::int64_t count;
};

// Fills a row with the tokens of its runs, padded and masked; `tokens` says of which type they are.
// `ahead` are runs that will be read next: they are asked for while this row is filled.
void fill_row(const Tokens& tokens, std::span<const Run> runs, std::span<const Run> ahead,
              const SampleOptions& options, const SampleRow& row);

// Fills row i with sample numbers[i] of *sources[i], straight from the mapped token files.
void gather_samples(std::span<const SampleSource* const> sources,
                    std::span<const std::int64_t> numbers, const SampleOptions& options,
                    const SampleRow& first_row);

}  // namespace millrace
