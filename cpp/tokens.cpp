#include "tokens.hpp"

#include <algorithm>
#include <cstddef>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {

std::int64_t size_of_token(const Tokens& tokens) noexcept {
  return std::visit([](auto first) { return static_cast<std::int64_t>(sizeof(*first)); }, tokens);
}

const std::uint8_t* bytes_of(const Tokens& tokens) noexcept {
  return std::visit([](auto first) { return reinterpret_cast<const std::uint8_t*>(first); },
                    tokens);
}

TokenSource::TokenSource(const Tokens& tokens, std::int64_t num_tokens, std::int64_t num_bytes,
                         Column<std::int64_t> sequence_pointers,
                         Column<std::int32_t> sequence_lengths)
    : tokens_(tokens),
      token_size_(size_of_token(tokens)),
      num_bytes_(num_bytes),
      // A damaged file may end in a part of a token, which the array of tokens leaves out.
      is_mapped_(num_bytes - num_tokens * token_size_ < token_size_),
      sequence_pointers_(sequence_pointers),
      sequence_lengths_(sequence_lengths) {
  if (sequence_pointers.size() != sequence_lengths.size()) {
    fail("sequence_pointers and sequence_lengths differ in size");
  }
}

TokenSource::TokenSource(std::span<const Tokens> shards, std::span<const std::int64_t> shard_sizes,
                         std::int64_t sequence_length, bool is_mapped)
    : tokens_(shards.empty() ? Tokens() : shards[0]),
      token_size_(size_of_token(tokens_)),
      num_bytes_(0),
      is_mapped_(is_mapped),
      sequence_length_(sequence_length) {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    num_bytes_ += shard_sizes[i] * sequence_length * token_size_;
    shards_.push_back(bytes_of(shards[i]));
    shard_ends_.push_back(num_bytes_);
  }
}

Piece TokenSource::locate(const Span& span) const {
  const bool has_shards = !shards_.empty();
  if (span.sequence == Span::whole_file && shards_.size() <= 1) {
    const std::int64_t num_tokens = num_bytes_ / token_size_;
    if (span.offset < 0 || span.count < 0 || span.count > num_tokens - span.offset) {
      fail(span.count, " tokens from token ", span.offset, " on lie outside the token file, which has ",
           num_tokens);
    }
    return {span.offset * token_size_, span.count * token_size_};
  }
  const std::int64_t num_sequences =
      has_shards ? num_bytes_ / (sequence_length_ * token_size_)
                 : static_cast<std::int64_t>(sequence_lengths_.size());
  const auto sequence =
      static_cast<std::size_t>(checked(span.sequence, num_sequences, "a span's sequence"));
  const std::int64_t length = has_shards ? sequence_length_ : sequence_lengths_[sequence];
  if (span.offset < 0 || span.count < 0 || span.count > length ||
      span.offset > length - span.count) {
    fail(span.count, " tokens from token ", span.offset, " on lie outside sequence ", sequence,
         ", which has ", length);
  }
  const std::int64_t pointer = has_shards ? span.sequence * sequence_length_ * token_size_
                                          : sequence_pointers_[sequence];
  const std::int64_t end = span.offset + span.count;
  if (pointer < 0 || pointer > num_bytes_ || (num_bytes_ - pointer) / token_size_ < end) {
    fail("sequence ", sequence, " starts at byte ", pointer, " of the token file, which has ",
         num_bytes_, ": tokens up to ", end, " lie outside it");
  }
  return {pointer + span.offset * token_size_, span.count * token_size_};
}

void TokenSource::cut_at_sequences(std::vector<Span>& spans) const {
  if (spans.empty() || spans.back().sequence != Span::whole_file) {
    return;
  }
  if (!shards_.empty()) {
    spans.back().sequence = 0;  // of raw tokens, which are one
    return;
  }
  Span rest = spans.back();
  spans.pop_back();
  const std::size_t above = first_not(sequence_pointers_.size(), [&](std::size_t place) {
    return sequence_pointers_[place] / token_size_ <= rest.offset;
  });
  for (auto sequence = static_cast<std::int64_t>(above) - 1; rest.count > 0; ++sequence) {
    const auto place = static_cast<std::size_t>(
        checked(sequence, static_cast<std::int64_t>(sequence_lengths_.size()), "a span's sequence"));
    const std::int64_t pointer = sequence_pointers_[place];
    const std::int64_t offset = pointer < 0 ? -1 : rest.offset - pointer / token_size_;
    const std::int64_t count = std::min(rest.count, sequence_lengths_[place] - offset);
    if (offset < 0 || count < 0) {
      fail("token ", rest.offset, " of the token file is in no sequence: sequence ", sequence, " has ",
           sequence_lengths_[place], " tokens from byte ", pointer, " on");
    }
    if (count > 0) {
      spans.push_back({sequence, offset, count});
    }
    rest.offset += count;
    rest.count -= count;
  }
}

const std::uint8_t* TokenSource::start_of(const Piece& piece) const noexcept {
  if (shards_.empty()) {
    return bytes_of(tokens_) + piece.offset;
  }
  // An empty piece may lie at the end of the last file.
  const auto end = std::upper_bound(shard_ends_.begin(), shard_ends_.end() - 1, piece.offset);
  const auto shard = static_cast<std::size_t>(end - shard_ends_.begin());
  return shards_[shard] + (piece.offset - (shard == 0 ? 0 : shard_ends_[shard - 1]));
}

void TokenSource::prefetch(const Span& span) const noexcept {
  prefetch_entry(sequence_lengths_, span.sequence);
  prefetch_entry(sequence_pointers_, span.sequence);
}

void locate_spans(const TokenSource& source, Column<std::int64_t> sequences,
                  Column<std::int64_t> offsets, Column<std::int64_t> counts,
                  std::span<std::int64_t> byte_offsets, std::span<std::int64_t> byte_counts) {
  if (offsets.size() != sequences.size() || counts.size() != sequences.size()) {
    fail("sequences, offsets and counts differ in size");
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    // Only an order of the core may mean the whole file.
    const std::int64_t sequence = checked(sequences[i], INT64_MAX, "a span's sequence");
    const Piece piece = source.locate({sequence, offsets[i], counts[i]});
    byte_offsets[i] = piece.offset;
    byte_counts[i] = piece.count;
  }
}

}  // namespace millrace
