// The Mersenne Twister MT19937 with the state layout of NumPy's legacy RandomState.
//
// Source of the algorithm: M. Matsumoto and T. Nishimura, "Mersenne Twister: a 623-dimensionally
// equidistributed uniform pseudo-random number generator", ACM TOMACS 8(1), 1998.
#pragma once

#include <array>
#include <cstdint>

namespace millrace {

class Mt19937 {
 public:
  static constexpr int state_size = 624;
  using Key = std::array<std::uint32_t, state_size>;

  // `key` and `position` as in numpy.random.RandomState.get_state(): `position` of the key's 624
  // words have been drawn.
  Mt19937(const Key& key, int position) : key_(key), position_(position) { temper(); }

  // Seeded with one word, as NumPy's legacy RandomState and torch's CPU generator are.
  explicit Mt19937(std::uint32_t seed) : position_(state_size) {
    for (std::uint32_t i = 0; i < state_size; ++i) {
      key_[i] = seed;
      seed = 1812433253U * (seed ^ (seed >> 30)) + i + 1;
    }
  }

  const Key& key() const noexcept { return key_; }
  int position() const noexcept { return position_; }

  std::uint32_t next32() {
    if (position_ == state_size) {
      advance();
    }
    return drawn_[static_cast<std::size_t>(position_++)];
  }

  // NumPy draws the high word first.
  std::uint64_t next64() {
    const std::uint64_t high = next32();
    return high << 32 | next32();
  }

  // The words that are left of this block (at least one, at most 624), to read in a tight loop;
  // the reader says with `skip` how many it took.
  const std::uint32_t* block() {
    if (position_ == state_size) {
      advance();
    }
    return drawn_.data() + position_;
  }
  int block_size() const noexcept { return state_size - position_; }
  void skip(int count) noexcept { position_ += count; }

 private:
  static constexpr int shift_ = 397;

  static std::uint32_t twist(std::uint32_t high, std::uint32_t low) noexcept {
    const std::uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
    return (mixed >> 1) ^ ((0U - (mixed & 1U)) & 0x9908b0dfU);
  }

  // Three loops without branches, and a tempering pass over the whole block: the compiler turns
  // each into vector code, which drawing word by word does not allow.
  void advance() noexcept {
    std::uint32_t* key = key_.data();
    for (int i = 0; i < state_size - shift_; ++i) {
      key[i] = key[i + shift_] ^ twist(key[i], key[i + 1]);
    }
    for (int i = state_size - shift_; i < state_size - 1; ++i) {
      key[i] = key[i + shift_ - state_size] ^ twist(key[i], key[i + 1]);
    }
    key[state_size - 1] = key[shift_ - 1] ^ twist(key[state_size - 1], key[0]);
    position_ = 0;
    temper();
  }

  void temper() noexcept {
    for (std::size_t i = 0; i < state_size; ++i) {
      std::uint32_t word = key_[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9d2c5680U;
      word ^= (word << 15) & 0xefc60000U;
      word ^= word >> 18;
      drawn_[i] = word;
    }
  }

  Key key_;
  Key drawn_{};
  int position_;
};

}  // namespace millrace
