// The order of sequences of one length as they are stored: sample n is sequence n, with all its tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "errors.hpp"
#include "order.hpp"

namespace millrace {

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

}  // namespace millrace
