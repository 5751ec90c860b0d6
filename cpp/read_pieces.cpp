#include "read_pieces.hpp"

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <system_error>
#include <vector>

#include "errors.hpp"
#include "prefetch.hpp"

namespace millrace {
namespace {

constexpr std::size_t max_entries = 1024;  // of one preadv: the kernel's own limit (UIO_MAXIOV)

// Bytes between two pieces that are read and dropped: copying them takes less time than another call.
constexpr std::int64_t max_gap = 4096;

// Bytes that are read before their words are looked at: they are still in the core's own cache.
constexpr std::int64_t words_block = 64 << 10;

constexpr std::int64_t window_size = 8 << 20;  // bytes that are prefetched together from a disk
constexpr std::int64_t page_size = 4096;
constexpr std::size_t check_distance = 256;  // pieces from one check for a disk to the next

// The pieces in the order of their offsets.
class SortedPieces {
 public:
  explicit SortedPieces(const FilePieces& pieces) : pieces_(pieces) {
    bool is_ascending = true;
    for (std::size_t i = 1; i < size(); ++i) {
      is_ascending &= pieces.offsets[i - 1] <= pieces.offsets[i];
    }
    if (!is_ascending) {
      order_.resize(size());
      std::iota(order_.begin(), order_.end(), std::size_t{0});
      std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
        return pieces.offsets[a] < pieces.offsets[b];
      });
    }
  }

  std::size_t size() const noexcept { return pieces_.offsets.size(); }
  std::size_t number(std::size_t i) const noexcept { return order_.empty() ? i : order_[i]; }
  std::int64_t offset(std::size_t i) const noexcept { return pieces_.offsets[number(i)]; }
  std::int64_t count(std::size_t i) const noexcept { return pieces_.sizes[number(i)]; }
  std::int64_t target(std::size_t i) const noexcept { return pieces_.targets[number(i)]; }

 private:
  const FilePieces& pieces_;
  std::vector<std::size_t> order_;  // empty if they are in order already
};

void check(const FilePieces& pieces, std::size_t buffer_size, bool has_words) {
  if (pieces.sizes.size() != pieces.offsets.size() ||
      pieces.targets.size() != pieces.offsets.size()) {
    fail("byte_offsets, sizes and targets differ in size");
  }
  const auto limit = static_cast<std::int64_t>(buffer_size);
  for (std::size_t i = 0; i < pieces.offsets.size(); ++i) {
    const std::int64_t offset = pieces.offsets[i];
    const std::int64_t size = pieces.sizes[i];
    const std::int64_t target = pieces.targets[i];
    if (offset < 0 || size < 0 || offset > std::numeric_limits<std::int64_t>::max() - size) {
      fail("piece ", i, " has ", size, " bytes from byte ", offset,
           " on, which is outside any file");
    }
    if (target < 0 || target > limit - size) {
      fail("piece ", i, " has ", size, " bytes for byte ", target,
           " on, outside the buffer of ", limit);
    }
    if (has_words && size % 4 != 0) {
      fail("piece ", i, " has ", size, " bytes, which are not 32-bit words");
    }
  }
}

// Reads bytes of the file into entries that lie anywhere; a read may come back short. Returns where
// the file ended, or the end of the last entry.
std::int64_t read_entries(int descriptor, std::int64_t offset, std::span<iovec> entries) {
  while (!entries.empty()) {
    const ssize_t size =
        preadv(descriptor, entries.data(), static_cast<int>(entries.size()), offset);
    if (size < 0) {
      if (errno == EINTR) {
        continue;
      }
      throw std::system_error(errno, std::generic_category(), "preadv");
    }
    if (size == 0) {
      break;
    }
    offset += size;
    auto left = static_cast<std::size_t>(size);
    while (!entries.empty() && left >= entries.front().iov_len) {
      left -= entries.front().iov_len;
      entries = entries.subspan(1);
    }
    if (left > 0) {
      entries.front().iov_base = static_cast<char*>(entries.front().iov_base) + left;
      entries.front().iov_len -= left;
    }
  }
  return offset;
}

// Starts to read the pieces from `first` on, about one window; returns the first piece beyond it.
std::size_t prefetch_window(int descriptor, const SortedPieces& pieces, std::size_t first) {
  std::int64_t left = window_size;
  std::size_t i = first;
  while (i < pieces.size() && left > 0) {
    const std::int64_t start = pieces.offset(i);
    std::int64_t stop = start;
    for (; i < pieces.size() && pieces.offset(i) - stop <= page_size && stop - start < left; ++i) {
      stop = std::max(stop, pieces.offset(i) + pieces.count(i));
    }
    if (stop > start) {  // a count of 0 would mean the rest of the file
      prefetch_range(descriptor, start, std::min(stop - start, left));
    }
    left -= stop - start + page_size;
  }
  return i;
}

// Reads that go to a disk are prefetched, one to two windows ahead: they are served side by side.
// What is in memory is not, which would take as long as reading it.
class ReadAhead {
 public:
  ReadAhead(int descriptor, const SortedPieces& pieces) : descriptor_(descriptor), pieces_(pieces) {}

  // To be called before piece `i` is read.
  void advance(std::size_t i) {
    if (i < next_check_) {
      return;
    }
    const bool is_cold = watch_.has_read();
    watch_ = DiskWatch();
    next_check_ = i + check_distance;
    if (is_cold) {
      next_check_ = std::max(i, ahead_);
      ahead_ = prefetch_window(descriptor_, pieces_, next_check_);
    }
  }

 private:
  int descriptor_;
  const SortedPieces& pieces_;
  DiskWatch watch_;
  std::size_t next_check_ = 1;  // the first read shows whether the file is on a disk
  std::size_t ahead_ = 0;       // the first piece that has not been prefetched
};

std::uint32_t or_of_words(const std::uint8_t* bytes, std::int64_t size) {
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < size; i += 4) {
    std::uint32_t word;
    std::memcpy(&word, bytes + i, sizeof(word));
    bits |= word;
  }
  return bits;
}

// The file ends at `stop`, inside one of the pieces from `first` on.
[[noreturn]] void fail_at_end(int descriptor, const SortedPieces& pieces, std::size_t first,
                              std::int64_t stop) {
  struct stat status = {};
  if (::fstat(descriptor, &status) == 0 && status.st_size < stop) {
    stop = status.st_size;  // the piece starts beyond the end
  }
  while (first + 1 < pieces.size() &&
         (pieces.count(first) == 0 || pieces.offset(first) + pieces.count(first) <= stop)) {
    ++first;
  }
  fail("the file ends at byte ", stop, ", before the end of a piece: piece ", pieces.number(first),
       " has ", pieces.count(first), " bytes from byte ", pieces.offset(first), " on");
}

}  // namespace

std::uint32_t read_pieces(int descriptor, const FilePieces& pieces, std::span<std::uint8_t> buffer,
                          bool or_words) {
  check(pieces, buffer.size(), or_words);
  const SortedPieces sorted(pieces);
  ReadAhead read_ahead(descriptor, sorted);
  std::array<std::uint8_t, max_gap> dropped;
  std::vector<iovec> entries;
  entries.reserve(max_entries);
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < sorted.size();) {
    read_ahead.advance(i);
    const std::size_t first = i;
    std::int64_t start = 0;
    std::int64_t stop = 0;
    entries.clear();
    // A piece takes up to two entries: the gap before it, and itself.
    for (; i < sorted.size() && entries.size() + 2 <= max_entries; ++i) {
      const std::int64_t size = sorted.count(i);
      if (size == 0) {
        continue;
      }
      const std::int64_t offset = sorted.offset(i);
      std::uint8_t* const target = buffer.data() + sorted.target(i);
      const auto length = static_cast<std::size_t>(size);
      if (entries.empty()) {
        start = stop = offset;
      }
      const std::int64_t gap = offset - stop;
      if (gap < 0 || gap > max_gap || (or_words && stop - start >= words_block)) {
        break;
      }
      if (gap > 0) {
        entries.push_back({dropped.data(), static_cast<std::size_t>(gap)});
      }
      if (gap == 0 && !entries.empty() &&
          static_cast<std::uint8_t*>(entries.back().iov_base) + entries.back().iov_len == target) {
        entries.back().iov_len += length;
      } else {
        entries.push_back({target, length});
      }
      stop = offset + size;
    }
    const std::int64_t reached = read_entries(descriptor, start, entries);
    if (reached < stop) {
      fail_at_end(descriptor, sorted, first, reached);
    }
    for (std::size_t k = first; or_words && k < i; ++k) {
      bits |= or_of_words(buffer.data() + sorted.target(k), sorted.count(k));
    }
  }
  return bits;
}

}  // namespace millrace
