#include "gpt_order.hpp"

#include <algorithm>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

constexpr std::int64_t max_offset = std::int64_t{1} << 31;  // lengths are int32

// How many documents of a sample are prefetched: the hardware's queues are full by then.
constexpr std::int64_t max_documents = 64;

template <class T>
std::int64_t entry(Column<T> column, std::int64_t place) noexcept {
  return static_cast<std::int64_t>(column[static_cast<std::size_t>(place)]);
}

template <class T>
std::int64_t size_of(Column<T> column) noexcept {
  return static_cast<std::int64_t>(column.size());
}

}  // namespace

GPTOrder::GPTOrder(Column<std::int32_t> sequence_lengths, Column<std::int32_t> document_index,
                   const SampleIndex& sample_index, const ShuffleIndex& shuffle_index,
                   std::int64_t sequence_length, bool add_extra_token)
    : sequence_lengths_(sequence_lengths),
      document_index_(document_index),
      sample_index_(sample_index),
      shuffle_index_(shuffle_index),
      extra_tokens_(add_extra_token ? 1 : 0),
      capacity_(sequence_length + extra_tokens_) {}

std::int64_t GPTOrder::num_samples() const noexcept {
  return std::visit([](auto index) { return size_of(index); }, shuffle_index_);
}

std::int64_t GPTOrder::num_rows() const noexcept {
  return std::visit([](auto index) { return size_of(index) / 2; }, sample_index_);
}

std::int64_t GPTOrder::row_of(std::int64_t sample_number) const noexcept {
  return std::visit([&](auto index) { return entry(index, sample_number); }, shuffle_index_);
}

GPTOrder::Boundary GPTOrder::boundary(std::int64_t row) const noexcept {
  return std::visit(
      [row](auto index) { return Boundary{entry(index, 2 * row), entry(index, 2 * row + 1)}; },
      sample_index_);
}

void GPTOrder::append_spans(std::int64_t sample_number, std::vector<Span>& spans) const {
  checked(sample_number, num_samples(), "the sample number");
  const std::int64_t row =
      checked(row_of(sample_number), num_rows() - 1, "an entry of shuffle_index");
  const Boundary begin = boundary(row);
  const Boundary end = boundary(row + 1);
  // With larger offsets the sums below could overflow.
  checked(begin.offset, max_offset, "an offset in sample_index");
  checked(end.offset, max_offset, "an offset in sample_index");
  if (begin.document > end.document) {
    fail("sample ", row, " goes from document ", begin.document, " back to ", end.document,
         " in sample_index, outside the order");
  }
  std::int64_t room = capacity_;
  for (std::int64_t document = begin.document; document <= end.document; ++document) {
    checked(document, size_of(document_index_), "a document in sample_index");
    const std::int64_t sequence = checked(entry(document_index_, document),
                                          size_of(sequence_lengths_),
                                          "a sequence in document_index");
    const std::int64_t length = entry(sequence_lengths_, sequence);
    const std::int64_t start = document == begin.document ? begin.offset : 0;
    const std::int64_t stop = document == end.document ? end.offset + extra_tokens_ : length;
    if (start > stop || stop > length || stop - start > room) {
      fail("tokens [", start, ", ", stop, ") of sequence ", sequence, ", which has ", length,
           ", do not fit a sample of ", capacity_, " that has ", capacity_ - room);
    }
    if (stop > start) {
      spans.push_back({sequence, start, stop - start});
      room -= stop - start;
    }
  }
}

void GPTOrder::prefetch(int stage, std::int64_t sample_number) const noexcept {
  if (stage == 0) {
    std::visit([&](auto index) { prefetch_entry(index, sample_number); }, shuffle_index_);
    return;
  }
  if (sample_number < 0 || sample_number >= num_samples()) {
    return;
  }
  const std::int64_t row = row_of(sample_number);
  if (stage == 1) {
    // The next row is most often on the same line.
    if (row >= 0 && row < num_rows()) {
      std::visit([&](auto index) { prefetch_entry(index, 2 * row); }, sample_index_);
    }
    return;
  }
  if (row < 0 || row >= num_rows() - 1) {
    return;
  }
  const std::int64_t size = size_of(document_index_);
  const std::int64_t first = std::clamp<std::int64_t>(boundary(row).document, 0, size);
  const std::int64_t last = std::min({boundary(row + 1).document, size - 1,
                                      first + max_documents - 1});
  for (std::int64_t document = first; document <= last; ++document) {
    if (stage == 2) {
      prefetch_entry(document_index_, document);
    } else {
      prefetch_entry(sequence_lengths_, entry(document_index_, document));
    }
  }
}

}  // namespace millrace
