// Samples straight from mapped token files.
#pragma once

#include <span>
#include <string>
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

// The tokens of some samples, and the spans that they were read from: span i is run i. The caller
// owns the vectors: a read of mapped memory may end in a jump (see mapping.hpp).
struct LocatedSamples {
  std::vector<Span> spans;
  TokenRuns runs;
};

// Finds the tokens of samples: those of sample i are sample sample_numbers[i] of sources[i]. Throws
// std::invalid_argument for a sample that there is not, and for arrays that disagree. With
// `by_sequence`, spans of a whole file are cut at its sequences.
void locate_samples(std::span<const SampleSource> sources, Column<std::int64_t> sample_numbers,
                    bool by_sequence, LocatedSamples& located);

// A bad token for a message, with its sequence.
std::string describe(const LocatedSamples& located, const BadToken& bad);

// Finds the documents of sequences: document j has the sequences document_indices[j] up to
// document_indices[j + 1]. A sequence of none is in document -1, or in the last one.
void find_documents(Column<std::int64_t> document_indices, Column<std::int64_t> sequences,
                    std::span<std::int64_t> documents);

}  // namespace millrace
