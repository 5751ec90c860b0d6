// The tokens of a token file, or of shards, and where each sequence of them lies.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "column.hpp"
#include "prefetch.hpp"
#include "ragged.hpp"

namespace millrace {

// The integer types that token files hold.
using Tokens = std::variant<const std::uint8_t*, const std::int8_t*, const std::int16_t*,
                            const std::uint16_t*, const std::int32_t*, const std::int64_t*>;

std::int64_t size_of_token(const Tokens& tokens) noexcept;
const std::uint8_t* bytes_of(const Tokens& tokens) noexcept;

// Some tokens of a sequence, or of the whole token file: `count` from token `offset` on.
struct Span {
  static constexpr std::int64_t whole_file = -1;  // in place of a sequence

  std::int64_t sequence;
  std::int64_t offset;
  std::int64_t count;
};

class TokenSource {
 public:
  // `num_tokens` are in memory (none if the file is not mapped), `num_bytes` in the token file.
  TokenSource(const Tokens& tokens, std::int64_t num_tokens, std::int64_t num_bytes,
              Column<std::int64_t> sequence_pointers, Column<std::int32_t> sequence_lengths);

  // Sequences of one length in several files, which hold `shard_sizes` of them. The offsets of pieces
  // count through all files as if they were one. `shards` are all of one type; if the files are not
  // mapped, they are null.
  TokenSource(std::span<const Tokens> shards, std::span<const std::int64_t> shard_sizes,
              std::int64_t sequence_length, bool is_mapped);

  // Their type, and where they start if they are those of one file.
  const Tokens& tokens() const noexcept { return tokens_; }
  bool is_mapped() const noexcept { return is_mapped_; }
  const RecentReads& recent_reads() const noexcept { return recent_reads_; }

  // The piece of the token file that a span is. Throws std::invalid_argument for a span outside its
  // sequence or the token file.
  Piece locate(const Span& span) const;

  // Cuts a span of the whole file, the last of `spans`, into spans of its sequences. Throws
  // std::invalid_argument where their arrays do not lead from one to the next.
  void cut_at_sequences(std::vector<Span>& spans) const;

  // Where a piece of the mapped tokens starts in memory.
  const std::uint8_t* start_of(const Piece& piece) const noexcept;

  // Prefetches what `locate` reads.
  void prefetch(const Span& span) const noexcept;

 private:
  Tokens tokens_;
  std::int64_t token_size_;
  std::int64_t num_bytes_;
  bool is_mapped_;
  Column<std::int64_t> sequence_pointers_;
  Column<std::int32_t> sequence_lengths_;
  std::vector<const std::uint8_t*> shards_;  // where each file starts in memory
  std::vector<std::int64_t> shard_ends_;     // the offset at which each ends
  std::int64_t sequence_length_ = 0;         // of all sequences of shards
  RecentReads recent_reads_;
};

// The pieces of spans, which are three columns.
void locate_spans(const TokenSource& source, Column<std::int64_t> sequences,
                  Column<std::int64_t> offsets, Column<std::int64_t> counts,
                  std::span<std::int64_t> byte_offsets, std::span<std::int64_t> byte_counts);

}  // namespace millrace
