#include "gather.hpp"

#include <algorithm>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

// Samples that go through each step together, so that their waits for memory overlap.
constexpr std::size_t group_size = 8;

// Appends the runs of the spans from `first` on, which are one sample's.
void append_runs(const TokenSource& source, std::span<const Span> spans, std::size_t first_of_group,
                 std::vector<Run>& runs) {
  for (const Span& span : spans) {
    const Piece piece = source.locate(span);
    runs.push_back({source.start_of(piece), piece.count});
    if (runs.size() - first_of_group <= prefetch_distance) {
      prefetch_run(runs.back());
    }
  }
}

// Prefetches the pages of a group of samples, if they are on a disk.
void prefetch_cold(std::span<const SampleSource> sources, std::span<const Run> runs) noexcept {
  const DiskWatch watch;
  const bool were_cold = std::ranges::any_of(sources, [](const SampleSource& source) {
    return source.tokens->recent_reads().are_cold();
  });
  if (!were_cold && runs.size() > 1 && runs[0].count > 0) {
    touch(runs[0].bytes);
  }
  bool has_read = !were_cold && watch.has_read();
  if (were_cold || has_read) {
    for (const Run& run : runs) {
      prefetch_pages(run.bytes, run.count);
    }
    has_read = watch.has_read();
    for (const SampleSource& source : sources) {
      source.tokens->recent_reads().note(has_read);
    }
  }
}

}  // namespace

void locate_samples(std::span<const SampleSource> sources, Column<std::int64_t> sample_numbers,
                    bool by_sequence, LocatedSamples& located) {
  std::vector<Span>& spans = located.spans;
  auto& [runs, bounds, types] = located.runs;
  bounds.push_back(0);
  for (std::size_t start = 0; start < sample_numbers.size(); start += group_size) {
    const std::size_t stop = std::min(start + group_size, sample_numbers.size());
    for (int stage = 0; stage < Order::num_prefetch_stages; ++stage) {
      for (std::size_t i = start; i < stop; ++i) {
        sources[i].order->prefetch(stage, sample_numbers[i]);
      }
    }
    for (std::size_t i = start; i < stop; ++i) {
      sources[i].order->append_spans(sample_numbers[i], spans);
      if (by_sequence) {
        sources[i].tokens->cut_at_sequences(spans);
      }
      for (std::size_t k = bounds.back(); k < spans.size(); ++k) {
        sources[i].tokens->prefetch(spans[k]);
      }
      bounds.push_back(spans.size());
      types.push_back(sources[i].tokens->tokens());
    }
    const std::size_t first_run = runs.size();
    for (std::size_t i = start; i < stop; ++i) {
      append_runs(*sources[i].tokens,
                  std::span(spans).subspan(bounds[i], bounds[i + 1] - bounds[i]), first_run, runs);
    }
    prefetch_cold(sources.subspan(start, stop - start), std::span(runs).subspan(first_run));
  }
}

std::string describe(const LocatedSamples& located, const BadToken& bad) {
  std::int64_t place = bad.place;
  std::size_t i = located.runs.bounds[bad.sample];
  for (; place >= located.spans[i].count; ++i) {
    place -= located.spans[i].count;
  }
  const Span& span = located.spans[i];
  return "token id " + text(bad.id) + " is outside [" + text(bad.least) + ", " + text(bad.limit) +
         "): it is token " + text(span.offset + place) +
         (span.sequence < 0 ? " of the token file" : " of sequence " + text(span.sequence)) +
         " and token " + text(bad.place) + " of the sample";
}

void find_documents(Column<std::int64_t> document_indices, Column<std::int64_t> sequences,
                    std::span<std::int64_t> documents) {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const std::size_t above = first_not(document_indices.size(), [&](std::size_t place) {
      return document_indices[place] <= sequences[i];
    });
    documents[i] = static_cast<std::int64_t>(above) - 1;
  }
}

}  // namespace millrace
