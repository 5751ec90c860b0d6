// An order: which tokens each sample has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "column.hpp"
#include "errors.hpp"
#include "tokens.hpp"

namespace millrace {

// An order may read mapped files: call `append_spans` and `prefetch` inside read_mapped.
class Order {
 public:
  virtual ~Order() = default;

  virtual std::int64_t num_samples() const noexcept = 0;

  // Appends the spans of a sample, in reading order and none of them empty. Throws
  // std::invalid_argument for a number outside [0, num_samples), and for arrays that disagree.
  virtual void append_spans(std::int64_t sample_number, std::vector<Span>& spans) const = 0;

  // A sample leads through several arrays, each a random place in memory. So a group of samples goes
  // through these stages together: each prefetches what the next one reads, the last one what
  // `append_spans` reads. Any sample number is allowed, and arrays that disagree.
  static constexpr int num_prefetch_stages = 4;
  virtual void prefetch(int stage, std::int64_t sample_number) const noexcept = 0;

 protected:
  Order() = default;
  Order(const Order&) = default;
  Order& operator=(const Order&) = default;
};

// The order of sequences of one length as they are stored: sample n is sequence n, with all tokens.
class SequenceOrder : public Order {
 public:
  SequenceOrder(std::int64_t num_sequences, std::int64_t sequence_length) noexcept
      : num_sequences_(num_sequences), sequence_length_(sequence_length) {}

  std::int64_t num_samples() const noexcept override { return num_sequences_; }

  void append_spans(std::int64_t sample_number, std::vector<Span>& spans) const override {
    spans.push_back(
        {checked(sample_number, num_sequences_, "the sample number"), 0, sequence_length_});
  }

  void prefetch(int /* stage */, std::int64_t /* sample_number */) const noexcept override {}

 private:
  std::int64_t num_sequences_;
  std::int64_t sequence_length_;
};

// The spans of some samples: sample i has spans bounds[i] up to bounds[i + 1].
// With `tokens`, spans of the whole file are cut at the sequences.
inline void collect_spans(const Order& order, Column<std::int64_t> sample_numbers,
                          const TokenSource* tokens, std::vector<Span>& spans,
                          std::span<std::int64_t> bounds) {
  bounds[0] = 0;
  for (std::size_t i = 0; i < sample_numbers.size(); ++i) {
    order.append_spans(sample_numbers[i], spans);
    if (tokens != nullptr) {
      tokens->cut_at_sequences(spans);
    }
    bounds[i + 1] = static_cast<std::int64_t>(spans.size());
  }
}

}  // namespace millrace
