#include "gather.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "pages.hpp"
#include "vector.hpp"

namespace millrace {
namespace {

constexpr std::int64_t max_offset = std::int64_t{1} << 31;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

std::int64_t checked(std::int64_t value, std::int64_t limit, const char* name) {
  if (value < 0 || value >= limit) {
    fail(std::string(name) + " is " + std::to_string(value) + ", outside [0, " +
         std::to_string(limit) + ")");
  }
  return value;
}

struct Place {
  std::int64_t document;
  std::int64_t offset;
};

Place place_at(const SampleSource& source, std::int64_t row) {
  return std::visit(
      [row](auto rows) {
        const auto first = static_cast<std::size_t>(2 * row);
        return Place{static_cast<std::int64_t>(rows[first]),
                     static_cast<std::int64_t>(rows[first + 1])};
      },
      source.sample_index);
}

// The widening copy. Token files may hold sequences at any byte, hence memcpy for each token; it
// compiles to plain (vector) loads.
template <class T>
void widen(const unsigned char* bytes, std::int64_t count, std::int64_t* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, bytes + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(token);
  }
}

// How many runs ahead their tokens are asked for while rows are filled, and how many bytes of each:
// the hardware follows from there.
constexpr std::size_t runs_ahead = 8;
constexpr std::int64_t bytes_ahead = 512;

void ask_for_tokens(const Run& run) {
  constexpr std::int64_t line_size = 64;
  for (std::int64_t at = 0; at < std::min(run.count, bytes_ahead); at += line_size) {
    __builtin_prefetch(run.bytes + at);
  }
}

// Lays a text down run by run, as tokens (its first sequence_length) and as labels (one token
// further on). Returns the number of tokens.
template <class T>
std::int64_t lay_down(std::span<const Run> runs, std::span<const Run> ahead,
                      std::int64_t sequence_length, const SampleRow& row) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(T));
  std::int64_t size = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i < ahead.size()) {
      ask_for_tokens(ahead[i]);
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

// The pieces of one sample, each checked against its sequence, the token file and the room left.
class Finder {
 public:
  Finder(const SampleSource& source, std::int64_t capacity, std::vector<Piece>& pieces)
      : source_(source),
        capacity_(capacity),
        width_(std::visit([](auto base) { return static_cast<std::int64_t>(sizeof(*base)); },
                          source.tokens)),
        pieces_(pieces) {}

  // Appends tokens [offset, offset + count) of a document, or all from `offset` on if count < 0.
  void append(std::int64_t document, std::int64_t offset, std::int64_t count) {
    checked(document, static_cast<std::int64_t>(source_.document_index.size()),
            "a document in sample_index");
    const auto sequence = static_cast<std::size_t>(
        checked(source_.document_index[static_cast<std::size_t>(document)],
                static_cast<std::int64_t>(source_.sequence_lengths.size()),
                "a sequence in document_index"));
    const std::int64_t length = source_.sequence_lengths[sequence];
    if (count < 0) {
      count = length - offset;
    }
    if (offset < 0 || count < 0 || offset > length - count || count > capacity_ - size_) {
      fail("tokens [" + std::to_string(offset) + ", " + std::to_string(offset + count) +
           ") of sequence " + std::to_string(sequence) + ", which has " + std::to_string(length) +
           ", do not fit a sample of " + std::to_string(capacity_) + " that has " +
           std::to_string(size_));
    }
    if (count == 0) {
      return;
    }
    const std::int64_t pointer = source_.sequence_pointers[sequence];
    if (pointer < 0 || pointer > source_.num_bytes ||
        (source_.num_bytes - pointer) / width_ < offset + count) {
      fail("sequence " + std::to_string(sequence) + " starts at byte " + std::to_string(pointer) +
           " of the token file, which has " + std::to_string(source_.num_bytes) +
           ": tokens up to " + std::to_string(offset + count) + " lie outside it");
    }
    pieces_.push_back({pointer + offset * width_, count * width_});
    size_ += count;
  }

 private:
  const SampleSource& source_;
  std::int64_t capacity_;
  std::int64_t width_;
  std::vector<Piece>& pieces_;
  std::int64_t size_ = 0;
};

// ---- asking for memory ahead ----
//
// A sample follows four indices to some documents, each a random place in a large array: done one
// after the other, most of the time goes into waiting. So a group of samples goes through each step
// together, and each step asks for what the next one reads. What is asked for need not exist.

constexpr std::size_t group_size = 8;
constexpr std::int64_t max_documents = 64;  // of a sample; the hardware's queues are full by then

template <class T>
void ask_for(Column<T> column, std::int64_t place) {
  if (place >= 0 && static_cast<std::size_t>(place) < column.size()) {
    __builtin_prefetch(column.at(static_cast<std::size_t>(place)));
  }
}

std::int64_t shuffled_at(const SampleSource& source, std::int64_t number) {
  return std::visit(
      [number](auto index) {
        return static_cast<std::int64_t>(index[static_cast<std::size_t>(number)]);
      },
      source.shuffle_index);
}

std::int64_t num_rows(const SampleSource& source) {
  return std::visit([](auto rows) { return static_cast<std::int64_t>(rows.size() / 2); },
                    source.sample_index);
}

const unsigned char* bytes_of(const Tokens& tokens) {
  return std::visit([](auto base) { return reinterpret_cast<const unsigned char*>(base); },
                    tokens);
}

void ask_for_shuffled(const SampleSource& source, std::int64_t number) {
  std::visit([number](auto index) { ask_for(index, number); }, source.shuffle_index);
}

// The row of the sample index that a sample number leads to; -1 where it leads nowhere.
std::int64_t row_of(const SampleSource& source, std::int64_t number) {
  if (number < 0 || number >= source.num_samples()) {
    return -1;
  }
  const std::int64_t row = shuffled_at(source, number);
  return row < num_rows(source) - 1 ? row : -1;
}

void ask_for_rows(const SampleSource& source, std::int64_t number) {
  const std::int64_t row = row_of(source, number);
  if (row >= 0) {
    std::visit([row](auto rows) { ask_for(rows, 2 * row); }, source.sample_index);
  }
}

template <class Use>
void for_documents(const SampleSource& source, std::int64_t number, Use use) {
  const std::int64_t row = row_of(source, number);
  if (row < 0) {
    return;
  }
  const auto size = static_cast<std::int64_t>(source.document_index.size());
  const std::int64_t first =
      std::clamp<std::int64_t>(place_at(source, row).document, 0, size);
  const std::int64_t last =
      std::clamp<std::int64_t>(place_at(source, row + 1).document, -1, size - 1);
  for (std::int64_t document = first;
       document <= last && document < first + max_documents; ++document) {
    use(document);
  }
}

void ask_for_documents(const SampleSource& source, std::int64_t number) {
  for_documents(source, number,
                [&source](std::int64_t document) { ask_for(source.document_index, document); });
}

void ask_for_sequences(const SampleSource& source, std::int64_t number) {
  for_documents(source, number, [&source](std::int64_t document) {
    const std::int32_t sequence = source.document_index[static_cast<std::size_t>(document)];
    ask_for(source.sequence_lengths, sequence);
    ask_for(source.sequence_pointers, sequence);
  });
}

// Whether a token is among the runs. Most samples hold no pad, and to look for it among the narrow
// tokens of the file costs a tenth of a pass over the row.
template <class T>
bool holds(std::span<const Run> runs, std::int64_t wanted) {
  if (!std::in_range<T>(wanted)) {
    return false;
  }
  T found = 0;  // as wide as a token, so that vector code need not widen
  for (const Run& run : runs) {
    for (std::int64_t at = 0; at < run.count; at += static_cast<std::int64_t>(sizeof(T))) {
      T token;
      std::memcpy(&token, run.bytes + at, sizeof(T));
      found = static_cast<T>(found | static_cast<T>(token == static_cast<T>(wanted)));
    }
  }
  return found != 0;
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

std::int64_t SampleSource::num_samples() const noexcept {
  return std::visit([](auto index) { return static_cast<std::int64_t>(index.size()); },
                    shuffle_index);
}

void find_pieces(const SampleSource& source, std::int64_t sample_number,
                 const SampleOptions& options, std::vector<Piece>& pieces) {
  checked(sample_number, source.num_samples(), "the sample number");
  const std::int64_t shuffled = checked(shuffled_at(source, sample_number), num_rows(source) - 1,
                                        "an entry of shuffle_index");
  const Place begin = place_at(source, shuffled);
  const Place end = place_at(source, shuffled + 1);
  const std::int64_t extra = options.add_extra_token ? 1 : 0;
  const std::int64_t capacity = options.sequence_length + extra;

  // Lengths are int32: with larger offsets the sums below could overflow.
  checked(begin.offset, max_offset, "an offset in sample_index");
  checked(end.offset, max_offset, "an offset in sample_index");
  if (begin.document > end.document) {
    fail("sample " + std::to_string(shuffled) + " goes from document " +
         std::to_string(begin.document) + " back to " + std::to_string(end.document) +
         " in sample_index, outside the order");
  }
  Finder finder(source, capacity, pieces);
  if (begin.document == end.document) {
    const std::int64_t count = end.offset - begin.offset + extra;
    checked(count, capacity + 1, "a sample's length in sample_index");
    finder.append(begin.document, begin.offset, count);
  } else {
    finder.append(begin.document, begin.offset, -1);
    for (std::int64_t document = begin.document + 1; document < end.document; ++document) {
      finder.append(document, 0, -1);
    }
    checked(end.offset + extra, capacity + 1, "a sample's end in sample_index");
    finder.append(end.document, 0, end.offset + extra);
  }
}

MILLRACE_VECTOR_CODE
void fill_row(const Tokens& tokens, std::span<const Run> runs, std::span<const Run> ahead,
              const SampleOptions& options, const SampleRow& row) {
  const std::int64_t length = options.sequence_length;
  const std::int64_t size = std::visit(
      [&]<class T>(const T*) { return lay_down<T>(runs, ahead, length, row); }, tokens);
  const std::int64_t num_tokens = std::min(size, length);
  // With no token at all there is no label before the first either.
  const std::int64_t num_labels = std::max<std::int64_t>(size - 1, 0);
  const std::optional<std::int64_t> pad = options.pad_token;
  std::fill(row.tokens + num_tokens, row.tokens + length, pad.value_or(0));
  std::fill(row.labels + num_labels, row.labels + length, pad.value_or(0));

  // A pad token counts as what it is, which may be EOD too; other filling is no token.
  const std::int64_t num_seen = pad ? length : num_tokens;
  std::fill_n(row.loss_mask, length, 1.0F);
  if (options.eod_mask_loss && options.eod_token) {
    const std::int64_t eod = *options.eod_token;
    for (std::int64_t i = 0; i < num_seen; ++i) {
      row.loss_mask[i] = row.tokens[i] == eod ? 0.0F : 1.0F;
    }
  }
  if (options.reset_position_ids && options.eod_token) {
    restart_positions(*options.eod_token, num_seen, length, row);
  } else {
    std::iota(row.position_ids, row.position_ids + length, std::int64_t{0});
  }
  if (!pad) {
    std::fill(row.loss_mask + num_labels, row.loss_mask + length, 0.0F);
  } else if (num_labels < length ||
             std::visit([&]<class T>(const T*) { return holds<T>(runs, *pad); }, tokens)) {
    mask_pads(*pad, length, row);
  }
}

void gather_samples(std::span<const SampleSource* const> sources,
                    Column<std::int64_t> numbers, const SampleOptions& options,
                    const SampleRow& first_row, GatherSpace& space) {
  std::vector<Piece>& pieces = space.pieces;
  std::vector<Run>& runs = space.runs;
  std::array<std::size_t, group_size + 1> bounds;
  for (std::size_t start = 0; start < numbers.size(); start += group_size) {
    const std::size_t stop = std::min(start + group_size, numbers.size());
    for (std::size_t i = start; i < stop; ++i) {
      ask_for_shuffled(*sources[i], numbers[i]);
    }
    for (std::size_t i = start; i < stop; ++i) {
      ask_for_rows(*sources[i], numbers[i]);
    }
    for (std::size_t i = start; i < stop; ++i) {
      ask_for_documents(*sources[i], numbers[i]);
    }
    for (std::size_t i = start; i < stop; ++i) {
      ask_for_sequences(*sources[i], numbers[i]);
    }
    runs.clear();
    bounds[0] = 0;
    for (std::size_t i = start; i < stop; ++i) {
      pieces.clear();
      find_pieces(*sources[i], numbers[i], options, pieces);
      for (const Piece& piece : pieces) {
        runs.push_back({bytes_of(sources[i]->tokens) + piece.offset, piece.count});
        if (runs.size() <= runs_ahead) {
          ask_for_tokens(runs.back());
        }
      }
      bounds[i - start + 1] = runs.size();
    }
    if (runs.size() > 1 && runs[0].count > 0 && is_cold(runs[0].bytes)) {
      for (const Run& run : runs) {
        ask_for_pages(run.bytes, run.count);
      }
    }
    const std::span<const Run> all = runs;
    for (std::size_t i = start; i < stop; ++i) {
      const std::size_t first = bounds[i - start];
      const auto at = static_cast<std::ptrdiff_t>(i) * options.sequence_length;
      fill_row(sources[i]->tokens, all.subspan(first, bounds[i - start + 1] - first),
               all.subspan(std::min(first + runs_ahead, all.size())), options,
               {first_row.tokens + at, first_row.labels + at, first_row.loss_mask + at,
                first_row.position_ids + at});
    }
  }
}

}  // namespace millrace
