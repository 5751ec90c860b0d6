#include "rows.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "errors.hpp"
#include "prefetch.hpp"
#include "vector.hpp"

namespace millrace {
namespace {

// The widening copy. Token files may hold sequences at any byte, hence memcpy for each token; it
// compiles to plain (vector) loads.
template <class T>
void widen(const std::uint8_t* bytes, std::int64_t count, std::int64_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, bytes + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(token);
  }
}

// Writes the runs' tokens, the first sequence_length of them as tokens, and all but the first as
// labels. Returns the number of tokens.
template <class T>
std::int64_t write_tokens_and_labels(std::span<const Run> runs, std::span<const Run> next_runs,
                                     std::int64_t sequence_length, const SampleRow& row) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(T));
  std::int64_t size = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i < next_runs.size()) {
      prefetch_run(next_runs[i]);
    }
    const std::int64_t count = runs[i].count / width;
    widen<T>(runs[i].bytes, std::min(count, sequence_length - size), row.tokens + size);
    const std::int64_t skipped = size == 0 ? 1 : 0;  // the first token is no label
    widen<T>(runs[i].bytes + skipped * width, count - skipped,
             row.labels + (size - 1 + skipped));
    size += count;
  }
  return size;
}

// Whether a token is among the runs. Most samples hold no pad, and to look for it among the narrow
// tokens of the file costs a tenth of a pass over the row.
template <class T>
bool contains(std::span<const Run> runs, std::int64_t token) {
  if (!std::in_range<T>(token)) {
    return false;
  }
  T is_there = 0;  // as wide as a token, so that vector code need not widen
  for (const Run& run : runs) {
    for (std::int64_t at = 0; at < run.count; at += static_cast<std::int64_t>(sizeof(T))) {
      T value;
      std::memcpy(&value, run.bytes + at, sizeof(T));
      is_there = static_cast<T>(is_there | static_cast<T>(value == static_cast<T>(token)));
    }
  }
  return is_there != 0;
}

void mask_pads(std::int64_t pad, std::int64_t length, const SampleRow& row) {
  for (std::int64_t i = 0; i < length; ++i) {
    row.loss_mask[i] = row.labels[i] == pad ? 0.0F : row.loss_mask[i];
    row.tokens[i] = row.tokens[i] == pad ? 0 : row.tokens[i];
    row.labels[i] = row.labels[i] == pad ? 0 : row.labels[i];
  }
}

// Position ids that start again after each EOD among the first `count` tokens.
void restart_positions(std::int64_t eod, std::int64_t count, std::int64_t length,
                       const SampleRow& row) {
  std::int64_t start = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    row.position_ids[i] = i - start;
    start = row.tokens[i] == eod ? i + 1 : start;
  }
  std::iota(row.position_ids + count, row.position_ids + length, count - start);
}

}  // namespace

void prefetch_run(const Run& run) noexcept {
  constexpr std::int64_t limit = 512;  // the hardware follows from there
  prefetch_bytes(run.bytes, run.count, limit);
}

MILLRACE_VECTOR_CODE
void fill_row(const Tokens& tokens, std::span<const Run> runs, std::span<const Run> next_runs,
              const SampleOptions& options, const SampleRow& row) {
  const std::int64_t length = options.sequence_length;
  const std::int64_t size = std::visit(
      [&]<class T>(const T*) { return write_tokens_and_labels<T>(runs, next_runs, length, row); },
      tokens);
  const std::int64_t num_tokens = std::min(size, length);
  // With no token at all there is no label before the first either.
  const std::int64_t num_labels = std::max<std::int64_t>(size - 1, 0);
  const std::optional<std::int64_t> pad = options.pad_token;
  std::fill(row.tokens + num_tokens, row.tokens + length, pad.value_or(0));
  std::fill(row.labels + num_labels, row.labels + length, pad.value_or(0));

  // A pad token counts as a token, which may be EOD too; other filling does not.
  const std::int64_t num_counted = pad ? length : num_tokens;
  std::fill_n(row.loss_mask, length, 1.0F);
  if (options.eod_mask_loss && options.eod_token) {
    const std::int64_t eod = *options.eod_token;
    for (std::int64_t i = 0; i < num_counted; ++i) {
      row.loss_mask[i] = row.tokens[i] == eod ? 0.0F : 1.0F;
    }
  }
  if (options.reset_position_ids && options.eod_token) {
    restart_positions(*options.eod_token, num_counted, length, row);
  } else {
    std::iota(row.position_ids, row.position_ids + length, std::int64_t{0});
  }
  if (!pad) {
    std::fill(row.loss_mask + num_labels, row.loss_mask + length, 0.0F);
  } else if (num_labels < length ||
             std::visit([&]<class T>(const T*) { return contains<T>(runs, *pad); }, tokens)) {
    mask_pads(*pad, length, row);
  }
}

void fill_rows(const Tokens& tokens, std::int64_t num_tokens, Column<std::int64_t> ends,
               const SampleOptions& options, const SampleRow& first_row) {
  const std::int64_t width = size_of_token(tokens);
  SampleRow row = first_row;
  std::int64_t start = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const std::int64_t end = ends[i];
    if (end < start || end - start > options.capacity() || end > num_tokens) {
      fail("a row from token ", start, " to ", end, " does not fit");
    }
    const Run run{bytes_of(tokens) + start * width, (end - start) * width};
    fill_row(tokens, std::span(&run, end > start ? 1 : 0), {}, options, row);
    row = row + options.sequence_length;
    start = end;
  }
}

}  // namespace millrace
