// The instant order: windows of the stored tokens, which each epoch takes in a permutation of its own.
// docs/instant_order.md defines it, in statements that the comments here name.
#pragma once

#include <cstdint>
#include <vector>

#include "order.hpp"

namespace millrace {

// The tokens that an order draws from: `num_tokens` of the token file, from `first_token` on. `key`
// decides the permutations (S1).
struct TokenRange {
  std::int64_t first_token;
  std::int64_t num_tokens;
  std::uint64_t key;
};

// Where a source is (S5): `drawn` tokens of the windows of an epoch.
struct EpochPosition {
  std::int64_t epoch;
  std::int64_t window_length;
  std::int64_t drawn;
};

// It has no end. Nothing is read, so there is nothing to prefetch.
class InstantOrder : public Order {
 public:
  // Samples of `sequence_length` tokens from `position` on, and one more token each if `extra_tokens`
  // is 1. Throws std::invalid_argument for a range without a window, and a position outside it.
  InstantOrder(const TokenRange& range, const EpochPosition& position, std::int64_t sequence_length,
               std::int64_t extra_tokens);

  std::int64_t num_samples() const noexcept override { return INT64_MAX; }
  void append_spans(std::int64_t sample_number, std::vector<Span>& spans) const override;
  void prefetch(int /* stage */, std::int64_t /* sample_number */) const noexcept override {}

 private:
  TokenRange range_;
  EpochPosition position_;
  std::int64_t sequence_length_;
  std::int64_t extra_tokens_;
};

}  // namespace millrace
