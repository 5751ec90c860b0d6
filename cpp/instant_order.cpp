#include "instant_order.hpp"

#include "errors.hpp"
#include "philox.hpp"
#include "swap_or_not.hpp"

namespace millrace {
namespace {

// S3. The label behind the last window is a token of the range for every offset of the windows.
std::int64_t num_windows(std::int64_t num_tokens, std::int64_t length) noexcept {
  return (num_tokens - length) / length;
}

}  // namespace

InstantOrder::InstantOrder(const TokenRange& range, const EpochPosition& position,
                           std::int64_t sequence_length, std::int64_t extra_tokens)
    : range_(range),
      position_(position),
      sequence_length_(sequence_length),
      extra_tokens_(extra_tokens) {
  const auto [epoch, length, drawn] = position;
  if (sequence_length < 1 || range.first_token < 0 ||
      num_windows(range.num_tokens, sequence_length) < 1 || epoch < 0 ||
      length < sequence_length || length % sequence_length != 0 || drawn < 0 ||
      drawn % sequence_length != 0 || drawn / length > num_windows(range.num_tokens, length)) {
    fail("of ", range.num_tokens, " tokens from token ", range.first_token, " on, no sample of ",
         sequence_length, " starts after ", drawn, " of epoch ", epoch, " in windows of ", length);
  }
}

void InstantOrder::append_spans(std::int64_t sample_number, std::vector<Span>& spans) const {
  checked(sample_number, INT64_MAX, "the sample number");
  auto [epoch, length, drawn] = position_;
  const std::int64_t size = num_windows(range_.num_tokens, length) * length;
  const std::int64_t later = sample_number - (size - drawn) / sequence_length_;
  if (later < 0) {
    drawn += sample_number * sequence_length_;
  } else {
    length = sequence_length_;
    const std::int64_t per_epoch = num_windows(range_.num_tokens, length);
    epoch += 1 + later / per_epoch;
    drawn = later % per_epoch * length;
  }
  // S2. NumPy's Philox counts up before it draws, hence the + 1.
  const PhiloxBlock words = philox({static_cast<std::uint64_t>(epoch) + 1, 0, 0, 0}, {range_.key, 0});
  const auto offset =
      static_cast<std::int64_t>(high_word(words[0], static_cast<std::uint64_t>(length)));
  const std::int64_t place = drawn / length;
  std::int64_t window = 0;
  swap_or_not({&place, 1}, num_windows(range_.num_tokens, length), words[1], true, {&window, 1});
  const std::int64_t start = range_.first_token + offset + window * length + drawn % length;
  spans.push_back({Span::whole_file, start, sequence_length_ + extra_tokens_});
}

}  // namespace millrace
