// Samples' tokens, labels, loss masks and position ids, straight from the token file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "column.hpp"
#include "ragged.hpp"

namespace millrace {

// The integer types that token files hold.
using Tokens = std::variant<const std::uint8_t*, const std::int8_t*, const std::int16_t*,
                            const std::uint16_t*, const std::int32_t*, const std::int64_t*>;

// One dataset's arrays: its token file and the three indices of a GPT dataset.
struct SampleSource {
  Tokens tokens;
  std::int64_t num_bytes;  // of the token file
  Column<std::int64_t> sequence_pointers;
  Column<std::int32_t> sequence_lengths;
  Column<std::int32_t> document_index;
  std::variant<Column<std::int32_t>, Column<std::int64_t>> sample_index;
  std::variant<Column<std::uint32_t>, Column<std::int64_t>> shuffle_index;

  std::int64_t num_samples() const noexcept;
};

struct SampleOptions {
  std::int64_t sequence_length;
  bool add_extra_token;
  std::optional<std::int64_t> pad_token;  // labels with this value are masked
  std::optional<std::int64_t> eod_token;  // used by the two switches below alone
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
// What the runs lack is filled with the pad token; where there is none, with 0, which is masked and
// taken for no token.
// `ahead` are runs that will be read next: they are asked for while this row is filled.
void fill_row(const Tokens& tokens, std::span<const Run> runs, std::span<const Run> ahead,
              const SampleOptions& options, const SampleRow& row);

// What a gathering notes on its way. It is the caller's: a read of mapped memory may end in a jump
// (see mapping.hpp).
struct GatherSpace {
  std::vector<Piece> pieces;
  std::vector<Run> runs;
};

// Fills row i with sample numbers[i] of *sources[i], straight from the mapped token files.
void gather_samples(std::span<const SampleSource* const> sources,
                    Column<std::int64_t> numbers, const SampleOptions& options,
                    const SampleRow& first_row, GatherSpace& space);

}  // namespace millrace
