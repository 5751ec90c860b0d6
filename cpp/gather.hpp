// Samples straight from mapped token files.
#pragma once

#include <span>
#include <vector>

#include "column.hpp"
#include "order.hpp"
#include "rows.hpp"
#include "tokens.hpp"

namespace millrace {

// Where samples come from: an order over the sequences of a token file, which is mapped.
struct SampleSource {
  const TokenSource* tokens;
  const Order* order;
};

// The vectors that `gather_samples` fills on its way. The caller owns them: a read of mapped memory
// may end in a jump (see mapping.hpp).
struct GatherSpace {
  std::vector<Span> spans;
  std::vector<Run> runs;
};

// Fills row i with sample sample_numbers[i] of sources[i]. Throws std::invalid_argument for a sample
// that there is not or that does not fit its row, and for arrays that disagree.
void gather_samples(std::span<const SampleSource> sources, Column<std::int64_t> sample_numbers,
                    const SampleOptions& options, const SampleRow& first_row, GatherSpace& space);

}  // namespace millrace
