// The order of packs: each epoch has all of them, in a permutation of its own.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "column.hpp"
#include "order.hpp"

namespace millrace {

// What is packed are pieces of sequences, of `capacity` tokens but for a sequence's last one: a number
// has the sequence in its low 32 bits, and above them which of its pieces it is.
class PackOrder : public Order {
 public:
  using Pieces = std::variant<Column<std::uint32_t>, Column<std::int64_t>>;

  // Pack k has the pieces pieces[pack_ends[k - 1]] up to pieces[pack_ends[k]].
  PackOrder(Column<std::int32_t> sequence_lengths, const Pieces& pieces,
            Column<std::int64_t> pack_ends, std::int64_t capacity, std::int64_t num_samples,
            std::uint64_t key)
      : sequence_lengths_(sequence_lengths),
        pieces_(pieces),
        pack_ends_(pack_ends),
        capacity_(capacity),
        num_samples_(num_samples),
        key_(key) {}

  std::int64_t num_samples() const noexcept override { return num_samples_; }
  void append_spans(std::int64_t sample_number, std::vector<Span>& spans) const override;
  void prefetch(int /* stage */, std::int64_t /* sample_number */) const noexcept override {}

 private:
  std::size_t pack_of(std::int64_t sample_number) const;
  Span span_of(std::int64_t piece) const;

  Column<std::int32_t> sequence_lengths_;
  Pieces pieces_;
  Column<std::int64_t> pack_ends_;
  std::int64_t capacity_;
  std::int64_t num_samples_;
  std::uint64_t key_;
};

}  // namespace millrace
