#include "pack_order.hpp"

#include <algorithm>

#include "errors.hpp"
#include "swap_or_not.hpp"

namespace millrace {

// Samples count through epochs, each with a key of its own: these lie apart by the golden ratio, as in
// SplitMix64.
std::size_t PackOrder::pack_of(std::int64_t sample_number) const {
  const auto num_packs = static_cast<std::int64_t>(pack_ends_.size());
  checked(sample_number, num_packs == 0 ? 0 : num_samples_, "the sample number");
  const std::int64_t place = sample_number % num_packs;
  const auto epoch = static_cast<std::uint64_t>(sample_number / num_packs);
  std::int64_t pack = 0;
  swap_or_not({&place, 1}, num_packs, key_ + epoch * 0x9E3779B97F4A7C15, true, {&pack, 1});
  return static_cast<std::size_t>(pack);
}

Span PackOrder::span_of(std::int64_t piece) const {
  const auto num_sequences = static_cast<std::int64_t>(sequence_lengths_.size());
  const std::int64_t sequence = checked(piece & 0xFFFFFFFF, num_sequences, "a packed sequence");
  const std::int64_t offset = capacity_ * (piece >> 32);
  const std::int64_t length = sequence_lengths_[static_cast<std::size_t>(sequence)];
  return {sequence, offset, std::min(length - offset, capacity_)};
}

void PackOrder::append_spans(std::int64_t sample_number, std::vector<Span>& spans) const {
  const std::size_t pack = pack_of(sample_number);
  const std::int64_t begin = pack == 0 ? 0 : pack_ends_[pack - 1];
  const std::int64_t end = pack_ends_[pack];
  const auto append = [&](auto pieces) {
    const auto num_pieces = static_cast<std::int64_t>(pieces.size());
    if (begin < 0 || end < begin || end > num_pieces) {
      fail("pack ", pack, " has pieces [", begin, ", ", end, ") of ", num_pieces);
    }
    std::int64_t room = capacity_;
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const Span span = span_of(static_cast<std::int64_t>(pieces[i]));
      room -= span.count;
      if (span.offset < 0 || span.count < 1 || room < 0) {
        fail("the sequences of pack ", pack, " do not fit its ", capacity_, " tokens");
      }
      spans.push_back(span);
    }
  };
  std::visit(append, pieces_);
}

}  // namespace millrace
