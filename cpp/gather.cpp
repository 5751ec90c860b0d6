#include "gather.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace millrace {
namespace {

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
void widen(const T* base, std::int64_t byte_offset, std::int64_t count, std::int64_t* out) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(base) + byte_offset;
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, bytes + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(token);
  }
}

// A text of at most `capacity` tokens that is laid down part by part, as tokens (its first
// sequence_length) and as labels (one token further on).
class Text {
 public:
  Text(const SampleSource& source, const SampleOptions& options, const SampleRow& row)
      : source_(source),
        row_(row),
        sequence_length_(options.sequence_length),
        capacity_(options.sequence_length + (options.add_extra_token ? 1 : 0)) {}

  // Appends tokens [offset, offset + count) of a sequence, or all from `offset` on if count < 0.
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
    if (count > 0) {
      std::visit([&](auto base) { copy(base, sequence, offset, count); }, source_.tokens);
      size_ += count;
    }
  }

  std::int64_t size() const noexcept { return size_; }

 private:
  template <class T>
  void copy(const T* base, std::size_t sequence, std::int64_t offset, std::int64_t count) {
    const std::int64_t pointer = source_.sequence_pointers[sequence];
    const auto width = static_cast<std::int64_t>(sizeof(T));
    if (pointer < 0 || pointer > source_.num_bytes ||
        (source_.num_bytes - pointer) / width < offset + count) {
      fail("sequence " + std::to_string(sequence) + " starts at byte " + std::to_string(pointer) +
           " of the token file, which has " + std::to_string(source_.num_bytes) +
           ": tokens up to " + std::to_string(offset + count) + " lie outside it");
    }
    const std::int64_t byte_offset = pointer + offset * width;
    const std::int64_t as_tokens = std::min(count, sequence_length_ - size_);
    widen(base, byte_offset, as_tokens, row_.tokens + size_);
    const std::int64_t skipped = size_ == 0 ? 1 : 0;  // the first token is no label
    widen(base, byte_offset + skipped * width, count - skipped, row_.labels + size_ - 1 + skipped);
  }

  const SampleSource& source_;
  const SampleRow& row_;
  std::int64_t sequence_length_;
  std::int64_t capacity_;
  std::int64_t size_ = 0;
};

void mask_pads(const SampleOptions& options, const SampleRow& row) {
  const std::int64_t pad = options.pad_token;
  for (std::int64_t i = 0; i < options.sequence_length; ++i) {
    row.loss_mask[i] = row.labels[i] == pad ? 0.0F : row.loss_mask[i];
    row.tokens[i] = row.tokens[i] == pad ? 0 : row.tokens[i];
    row.labels[i] = row.labels[i] == pad ? 0 : row.labels[i];
  }
}

void restart_positions(const SampleOptions& options, const SampleRow& row) {
  std::int64_t start = 0;
  for (std::int64_t i = 0; i < options.sequence_length; ++i) {
    row.position_ids[i] = i - start;
    start = row.tokens[i] == options.eod_token ? i + 1 : start;
  }
}

}  // namespace

std::int64_t SampleSource::num_samples() const noexcept {
  return std::visit([](auto index) { return static_cast<std::int64_t>(index.size()); },
                    shuffle_index);
}

void gather_sample(const SampleSource& source, std::int64_t sample_number,
                   const SampleOptions& options, const SampleRow& row) {
  checked(sample_number, source.num_samples(), "the sample number");
  const std::int64_t shuffled = std::visit(
      [sample_number](auto index) {
        return static_cast<std::int64_t>(index[static_cast<std::size_t>(sample_number)]);
      },
      source.shuffle_index);
  const auto num_rows = static_cast<std::int64_t>(
      std::visit([](auto rows) { return rows.size() / 2; }, source.sample_index));
  checked(shuffled, num_rows - 1, "an entry of shuffle_index");
  const Place begin = place_at(source, shuffled);
  const Place end = place_at(source, shuffled + 1);
  const std::int64_t extra = options.add_extra_token ? 1 : 0;

  Text text(source, options, row);
  if (begin.document >= end.document) {
    const std::int64_t count = end.offset - begin.offset + extra;
    checked(count, options.sequence_length + extra + 1, "a sample's length in sample_index");
    text.append(begin.document, begin.offset, count);
  } else {
    text.append(begin.document, begin.offset, -1);
    for (std::int64_t document = begin.document + 1; document < end.document; ++document) {
      text.append(document, 0, -1);
    }
    checked(end.offset + extra, options.sequence_length + extra + 1,
            "a sample's end in sample_index");
    text.append(end.document, 0, end.offset + extra);
  }

  const std::int64_t length = options.sequence_length;
  const std::int64_t pad = options.pad_token;
  std::fill(row.tokens + std::min(text.size(), length), row.tokens + length, pad);
  // With no token at all there is no label before the first either.
  std::fill(row.labels + std::max<std::int64_t>(text.size() - 1, 0), row.labels + length, pad);

  std::fill_n(row.loss_mask, length, 1.0F);
  if (options.eod_mask_loss) {
    for (std::int64_t i = 0; i < length; ++i) {
      row.loss_mask[i] = row.tokens[i] == options.eod_token ? 0.0F : 1.0F;
    }
  }
  if (options.reset_position_ids) {
    restart_positions(options, row);
  } else {
    std::iota(row.position_ids, row.position_ids + length, std::int64_t{0});
  }
  // Unsigned tokens never equal a negative pad: a full sample needs no second pass then.
  const bool is_full = text.size() == length + extra && options.add_extra_token;
  const bool is_signed = std::visit(
      [](auto base) { return std::is_signed_v<std::remove_cvref_t<decltype(*base)>>; },
      source.tokens);
  if (!is_full || is_signed || pad >= 0) {
    mask_pads(options, row);
  }
}

}  // namespace millrace
