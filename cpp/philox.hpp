// The counter-based generator Philox4x64-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC'11): a block of four words is a pure function of counter and key.
#pragma once

#include <array>
#include <cstdint>

namespace millrace {

__extension__ using Uint128 = unsigned __int128;

// The high word of a product of two words. For a random `word`, it is uniform in [0, limit), but for
// a bias of at most limit / 2**64.
constexpr std::uint64_t high_word(std::uint64_t word, std::uint64_t limit) noexcept {
  return static_cast<std::uint64_t>((Uint128{word} * limit) >> 64);
}

using PhiloxBlock = std::array<std::uint64_t, 4>;

constexpr PhiloxBlock philox(PhiloxBlock counter, std::array<std::uint64_t, 2> key) noexcept {
  constexpr std::uint64_t multipliers[] = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
  constexpr std::uint64_t increments[] = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};
  constexpr int num_rounds = 10;
  for (int round = 0; round < num_rounds; ++round) {
    counter = {high_word(multipliers[1], counter[2]) ^ counter[1] ^ key[0],
               multipliers[1] * counter[2],
               high_word(multipliers[0], counter[0]) ^ counter[3] ^ key[1],
               multipliers[0] * counter[0]};
    key = {key[0] + increments[0], key[1] + increments[1]};
  }
  return counter;
}

}  // namespace millrace
