#include "gather.hpp"

#include <algorithm>
#include <stdexcept>

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
    runs.push_back({bytes_of(source.tokens()) + piece.offset, piece.count});
    if (runs.size() - first_of_group <= prefetch_distance) {
      prefetch_run(runs.back());
    }
  }
}

}  // namespace

void locate_texts(std::span<const SampleSource> sources, Column<std::int64_t> sample_numbers,
                  LocatedTexts& located) {
  std::vector<Span>& spans = located.spans;
  auto& [runs, bounds, types] = located.texts;
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
    const std::span<const Run> group = std::span<const Run>(runs).subspan(first_run);
    if (group.size() > 1 && group[0].count > 0 && is_cold(group[0].bytes)) {
      for (const Run& run : group) {
        prefetch_pages(run.bytes, run.count);
      }
    }
  }
}

std::string describe(const LocatedTexts& located, const BadToken& bad) {
  std::int64_t place = bad.place;
  std::size_t i = located.texts.bounds[bad.sample];
  for (; place >= located.spans[i].count; ++i) {
    place -= located.spans[i].count;
  }
  const Span& span = located.spans[i];
  return "token id " + text(bad.id) + " is outside [" + text(bad.least) + ", " + text(bad.limit) +
         "): it is token " + text(span.offset + place) + " of sequence " + text(span.sequence) +
         " and token " + text(bad.place) + " of the sample";
}

}  // namespace millrace
