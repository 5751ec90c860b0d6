#include "packing.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <numeric>

#include "errors.hpp"

namespace millrace {
namespace {

constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

// A set of numbers below a size that finds its least number above another one: bits in words, and
// above them, level by level, bits that tell which words of the level below are not 0.
class NumberSet {
 public:
  explicit NumberSet(std::size_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size);
    } while (size > 1);
  }

  void insert(std::size_t number) {
    for (auto& level : levels_) {
      level[number / 64] |= 1ULL << (number % 64);
      number /= 64;
    }
  }

  void erase(std::size_t number) {
    for (auto& level : levels_) {
      level[number / 64] &= ~(1ULL << (number % 64));
      if (level[number / 64] != 0) {
        return;
      }
      number /= 64;
    }
  }

  // The least number of the set that is not below this one, or `none`.
  std::size_t at_least(std::size_t number) const {
    for (std::size_t height = 0; height < levels_.size(); ++height) {
      if (number / 64 >= levels_[height].size()) {
        return none;
      }
      const std::uint64_t word = levels_[height][number / 64] >> (number % 64);
      if (word != 0) {
        number += static_cast<std::size_t>(std::countr_zero(word));
        while (height-- > 0) {
          number = 64 * number + static_cast<std::size_t>(std::countr_zero(levels_[height][number]));
        }
        return number;
      }
      number = number / 64 + 1;
    }
    return none;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;
};

// The packs by their room. No document has 0 tokens, so that full packs are not found again.
class Rooms {
 public:
  explicit Rooms(std::size_t capacity)
      : capacity_(capacity), rooms_(capacity + 1), last_(capacity + 1, none) {}

  // Puts a document into a pack, and returns its number.
  std::size_t put(std::size_t length) {
    std::size_t room = rooms_.at_least(length);
    std::size_t pack = before_.size();
    if (room == none) {
      room = capacity_;
      before_.push_back(none);
    } else {
      pack = last_[room];
      last_[room] = before_[pack];
      if (last_[room] == none) {
        rooms_.erase(room);
      }
    }
    room -= length;
    before_[pack] = last_[room];
    last_[room] = pack;
    rooms_.insert(room);
    return pack;
  }

  std::size_t num_packs() const noexcept { return before_.size(); }

 private:
  std::size_t capacity_;
  NumberSet rooms_;                  // that some pack has
  std::vector<std::size_t> last_;    // the pack of each room that was filled last
  std::vector<std::size_t> before_;  // the pack of the same room that was filled before
};

}  // namespace

Packs pack(Column<std::int32_t> lengths, std::int64_t capacity) {
  // Of each document, how much shorter than a pack it is, and its place: numbers sort fast.
  std::vector<std::uint64_t> order(lengths.size());
  for (std::size_t place = 0; place < order.size(); ++place) {
    if (lengths[place] < 1 || lengths[place] > capacity) {
      fail("a document has ", lengths[place], " tokens; a pack takes 1 to ", capacity);
    }
    order[place] = static_cast<std::uint64_t>(capacity - lengths[place]) << 32 | place;
  }
  std::ranges::sort(order);
  Rooms rooms(static_cast<std::size_t>(capacity));
  std::vector<std::size_t> pack_of(order.size());
  for (const std::uint64_t entry : order) {
    const std::size_t document = entry & 0xFFFFFFFF;
    pack_of[document] = rooms.put(static_cast<std::size_t>(lengths[document]));
  }
  // Each document behind those of earlier packs, and behind earlier ones of its pack.
  Packs packs{std::vector<std::int64_t>(order.size()),
              std::vector<std::int64_t>(rooms.num_packs())};
  for (const std::size_t pack : pack_of) {
    ++packs.ends[pack];
  }
  std::exclusive_scan(packs.ends.begin(), packs.ends.end(), packs.ends.begin(), std::int64_t{0});
  for (std::size_t document = 0; document < order.size(); ++document) {
    const auto place = static_cast<std::size_t>(packs.ends[pack_of[document]]++);
    packs.documents[place] = static_cast<std::int64_t>(document);
  }
  return packs;
}

}  // namespace millrace
