#include "token_buffer.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "errors.hpp"

namespace millrace {

namespace {

std::int64_t sum_of_lengths(std::span<const std::int64_t> lengths) {
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) {
    if (!std::in_range<std::int32_t>(length) || length < 0) {
      fail("the sequences' lengths hold ", length, "; 0 to 2147483647 is possible");
    }
    sum += length;  // int32 each, so that no array in memory can overflow it
  }
  return sum;
}

[[noreturn]] void refuse_sum(std::int64_t sum, std::int64_t num_tokens) {
  fail("the sequences' lengths sum to ", sum, "; there are ", num_tokens, " tokens");
}

}  // namespace

TokenBuffer::TokenBuffer(const std::string& dtype, std::size_t capacity, int file, bool has_modes)
    : dtype_(dtype),
      type_(type_named(dtype)),
      has_modes_(has_modes),
      capacity_(capacity),
      bytes_(allocate<std::uint8_t>(capacity)),
      writer_(file) {}

TokenBuffer::Type TokenBuffer::type_named(const std::string& dtype) {
  if (dtype == "uint8") return std::uint8_t{};
  if (dtype == "int8") return std::int8_t{};
  if (dtype == "int16") return std::int16_t{};
  if (dtype == "uint16") return std::uint16_t{};
  if (dtype == "int32") return std::int32_t{};
  if (dtype == "int64") return std::int64_t{};
  if (dtype == "float32") return float{};
  if (dtype == "float64") return double{};
  fail("tokens cannot be buffered as ", dtype);
}

void TokenBuffer::end_sequences(std::span<const std::int64_t> parts,
                                const std::optional<Column<std::int8_t>>& kinds,
                                bool ends_document) {
  const std::int64_t sum = sum_of_lengths(parts);
  if (sum != num_loose_) {
    refuse_sum(sum, num_loose_);
  }
  if (kinds && kinds->size() != parts.size()) {
    fail("there are ", kinds->size(), " modes for ", parts.size(), " sequences");
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    end_sequence(parts[i], kinds ? (*kinds)[i] : std::int8_t{0});
  }
  if (ends_document) {
    end_document();
  }
}

void TokenBuffer::end_sequence(std::int64_t length, std::int8_t mode) {
  lengths.push_back(static_cast<std::int32_t>(length));
  if (has_modes_) {
    modes.push_back(mode);
  }
  num_tokens += length;
  num_loose_ -= length;
  ++num_sequences;
  has_open_document = true;
}

void TokenBuffer::end_document() {
  document_ends.push_back(num_sequences);
  ++num_documents;
  has_open_document = false;
}

void TokenBuffer::end_documents(std::span<const std::int64_t> parts) {
  const std::int64_t sum = sum_of_lengths(parts);
  if (sum > num_loose_) {
    refuse_sum(sum, num_loose_);
  }
  for (const std::int64_t length : parts) {
    if (length > 0) {
      end_sequence(length, 0);
    }
    end_document();
  }
}

void TokenBuffer::refuse(const std::string& token) const {
  std::visit(
      [&]<class To>(To) {
        using Limits = std::numeric_limits<To>;
        fail("token ", token, " does not fit ", dtype_, ", which holds ", Limits::min(), " to ",
             Limits::max());
      },
      type_);
  __builtin_unreachable();
}

void TokenBuffer::grow(std::size_t size) {
  auto larger = allocate<std::uint8_t>(std::max(2 * bytes_.size, size));
  if (used_ > 0) {  // else there may be no memory to copy from
    std::memcpy(larger.data.get(), data(), used_);
  }
  bytes_ = std::move(larger);
}

void TokenBuffer::flush() {
  writer_.start(bytes_, std::exchange(used_, 0));
  if (bytes_.size < capacity_) {
    bytes_ = allocate<std::uint8_t>(capacity_);
  }
}

void TokenBuffer::free_memory() noexcept {
  bytes_ = {};
  used_ = capacity_ = 0;
}

}  // namespace millrace
