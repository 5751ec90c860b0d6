#include "gather.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

// Samples that go through each step together, so that their waits for memory overlap.
constexpr std::size_t group_size = 8;

// Appends the runs of some spans, which are one sample's.
void append_runs(const TokenSource& source, std::span<const Span> spans,
                 const SampleOptions& options, std::vector<Run>& runs) {
  std::int64_t room = options.capacity();
  for (const Span& span : spans) {
    const Piece piece = source.locate(span);
    room -= span.count;
    if (room < 0) {
      fail("the tokens of a sample do not fit its row of ", options.capacity());
    }
    runs.push_back({bytes_of(source.tokens()) + piece.offset, piece.count});
    if (runs.size() <= prefetch_distance) {
      prefetch_run(runs.back());
    }
  }
}

bool were_cold(std::span<const SampleSource> sources) {
  return std::ranges::any_of(sources, [](const SampleSource& source) {
    return source.tokens->recent_reads().are_cold();
  });
}

}  // namespace

void gather_samples(std::span<const SampleSource> sources, Column<std::int64_t> sample_numbers,
                    const SampleOptions& options, const SampleRow& first_row,
                    GatherSpace& space) {
  std::vector<Span>& spans = space.spans;
  std::vector<Run>& runs = space.runs;
  std::array<std::size_t, group_size + 1> span_bounds;
  std::array<std::size_t, group_size + 1> run_bounds;
  for (std::size_t start = 0; start < sample_numbers.size(); start += group_size) {
    const std::size_t stop = std::min(start + group_size, sample_numbers.size());
    for (int stage = 0; stage < Order::num_prefetch_stages; ++stage) {
      for (std::size_t i = start; i < stop; ++i) {
        sources[i].order->prefetch(stage, sample_numbers[i]);
      }
    }
    spans.clear();
    span_bounds[0] = 0;
    for (std::size_t i = start; i < stop; ++i) {
      const std::size_t first = spans.size();
      sources[i].order->append_spans(sample_numbers[i], spans);
      for (std::size_t k = first; k < spans.size(); ++k) {
        sources[i].tokens->prefetch(spans[k]);
      }
      span_bounds[i - start + 1] = spans.size();
    }
    runs.clear();
    run_bounds[0] = 0;
    for (std::size_t i = start; i < stop; ++i) {
      const std::size_t first = span_bounds[i - start];
      append_runs(*sources[i].tokens,
                  std::span(spans).subspan(first, span_bounds[i - start + 1] - first), options,
                  runs);
      run_bounds[i - start + 1] = runs.size();
    }
    const DiskWatch watch;
    bool is_cold = were_cold(sources.subspan(start, stop - start));
    if (!is_cold && runs.size() > 1 && runs[0].count > 0) {
      touch(runs[0].bytes);
      is_cold = watch.has_read();
    }
    if (is_cold) {
      for (const Run& run : runs) {
        prefetch_pages(run.bytes, run.count);
      }
    }
    const std::span<const Run> all = runs;
    for (std::size_t i = start; i < stop; ++i) {
      const std::size_t first = run_bounds[i - start];
      fill_row(sources[i].tokens->tokens(), all.subspan(first, run_bounds[i - start + 1] - first),
               all.subspan(std::min(first + prefetch_distance, all.size())), options,
               first_row + static_cast<std::int64_t>(i) * options.sequence_length);
    }
    const bool has_read_disk = watch.has_read();
    for (std::size_t i = start; i < stop; ++i) {
      sources[i].tokens->recent_reads().note(has_read_disk);
    }
  }
}

}  // namespace millrace
