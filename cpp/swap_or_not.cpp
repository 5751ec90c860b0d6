#include "swap_or_not.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "philox.hpp"
#include "vector.hpp"

namespace millrace {
namespace {

constexpr std::size_t block_size = 512;  // numbers that take all rounds together, in the L1 cache

struct Round {
  std::uint64_t sum;     // of a number and its partner, modulo the size
  std::uint64_t offset;  // of the numbers that are hashed
};

// A batch takes a number or two from each of many sources, and to derive the rounds takes a
// microsecond, four times as long as to take them: a thread keeps those of 256 permutations (400 kB).
const std::vector<Round>& rounds_of(std::uint64_t size, std::uint64_t key, bool is_inverse) {
  using Name = std::tuple<std::uint64_t, std::uint64_t, bool>;  // size, key, is_inverse
  thread_local std::vector<std::pair<Name, std::vector<Round>>> recent(256);
  auto& [name, rounds] = recent[key % recent.size()];
  if (name != Name{size, key, is_inverse}) {
    rounds.resize(48 + 2 * static_cast<std::size_t>(std::bit_width(size)));
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      // NumPy's Philox counts up before it draws, hence the + 1.
      const PhiloxBlock words = philox({i + 1, size, 0, 0}, {key, 0});
      rounds[is_inverse ? rounds.size() - 1 - i : i] = {high_word(words[0], size), words[1]};
    }
    name = {size, key, is_inverse};
  }
  return rounds;
}

// The top bit of SplitMix64's finalizer, which depends on every bit of the value.
inline bool random_bit(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return (value >> 63) != 0;
}

MILLRACE_VECTOR_CODE
void take_rounds(const Round* rounds, std::size_t num_rounds, std::uint64_t size,
                 std::uint64_t* numbers, std::size_t count) {
  for (std::size_t r = 0; r < num_rounds; ++r) {
    const auto [sum, offset] = rounds[r];
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t number = numbers[i];
      const std::uint64_t partner = sum - number + (sum < number ? size : 0);
      numbers[i] = random_bit(std::max(number, partner) + offset) ? partner : number;
    }
  }
}

}  // namespace

void swap_or_not(Column<std::int64_t> numbers, std::int64_t size, std::uint64_t key, bool is_inverse,
                 std::span<std::int64_t> out) {
  const auto limit = static_cast<std::uint64_t>(size);
  const std::vector<Round>& rounds = rounds_of(limit, key, is_inverse);
  std::array<std::uint64_t, block_size> block;
  for (std::size_t first = 0; first < out.size(); first += block_size) {
    const std::size_t count = std::min(block_size, out.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      block[i] = static_cast<std::uint64_t>(checked(numbers[first + i], size, "number"));
    }
    take_rounds(rounds.data(), rounds.size(), limit, block.data(), count);
    for (std::size_t i = 0; i < count; ++i) {
      out[first + i] = static_cast<std::int64_t>(block[i]);
    }
  }
}

}  // namespace millrace
