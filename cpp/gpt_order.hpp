// Megatron-LM's order: documents in a row, cut into samples, the samples shuffled.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "column.hpp"
#include "order.hpp"

namespace millrace {

class GPTOrder : public Order {
 public:
  using SampleIndex = std::variant<Column<std::int32_t>, Column<std::int64_t>>;
  using ShuffleIndex = std::variant<Column<std::uint32_t>, Column<std::int64_t>>;

  // `document_index` has places in `sequence_lengths`; the rows of `sample_index` (see
  // sample_index.hpp) have places in `document_index`; `shuffle_index` has rows of `sample_index`.
  GPTOrder(Column<std::int32_t> sequence_lengths, Column<std::int32_t> document_index,
           const SampleIndex& sample_index, const ShuffleIndex& shuffle_index,
           std::int64_t sequence_length, bool add_extra_token);

  std::int64_t num_samples() const noexcept override;
  void append_spans(std::int64_t sample_number, std::vector<Span>& spans) const override;
  void prefetch(int stage, std::int64_t sample_number) const noexcept override;

 private:
  // Where a sample starts, or ends: a place in the document index, and a token of that document.
  struct Boundary {
    std::int64_t document;
    std::int64_t offset;
  };

  std::int64_t num_rows() const noexcept;
  std::int64_t row_of(std::int64_t sample_number) const noexcept;
  Boundary boundary(std::int64_t row) const noexcept;

  Column<std::int32_t> sequence_lengths_;
  Column<std::int32_t> document_index_;
  SampleIndex sample_index_;
  ShuffleIndex shuffle_index_;
  std::int64_t extra_tokens_;
  std::int64_t capacity_;  // of a sample, in tokens
};

}  // namespace millrace
