// Documents on their way to a token file: tokens, each checked and narrowed to the file's dtype, the
// lengths and modes of sequences, and where documents end. Full buffers are written by a thread while
// the next one fills.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "buffer.hpp"
#include "column.hpp"
#include "errors.hpp"
#include "narrow.hpp"
#include "write_behind.hpp"

namespace millrace {

// A function adds all of its arguments or, if it throws (std::invalid_argument), nothing.
class TokenBuffer {
 public:
  // A negative `file`: no file, nothing can be flushed. Without modes none are kept.
  TokenBuffer(const std::string& dtype, std::size_t capacity, int file, bool has_modes);

  // Appends tokens, which belong to no sequence yet. Floats must be of the file's dtype.
  template <class From>
  void append(std::span<const From> tokens);

  std::size_t num_bytes() const noexcept { return used_; }

  // Makes sequences of the tokens without one: their lengths, which sum to the number of these tokens,
  // and their modes (0 if there are none).
  void end_sequences(std::span<const std::int64_t> parts,
                     const std::optional<Column<std::int8_t>>& kinds, bool ends_document);

  // Ends the open document.
  void end_document();

  // Ends documents of one sequence each, or of none where a length is 0, made of the first tokens
  // without a sequence.
  void end_documents(std::span<const std::int64_t> parts);

  // Whether it is time to flush.
  bool is_full() const noexcept {
    constexpr std::size_t max_entries = std::size_t{1} << 16;
    return used_ >= capacity_ || lengths.size() >= max_entries ||
           document_ends.size() >= max_entries;
  }

  std::uint8_t* data() const noexcept { return bytes_.data.get(); }

  // Starts to write the buffer to the end of the file, and empties it. Call `wait` before.
  void flush();

  // Returns when all is written that was flushed: 0, or the number of the error.
  int wait() { return writer_.wait(); }

  // Waits, and gives up the descriptor.
  void close_file() { writer_.close(); }

  // Gives up the memory. The counts stay.
  void free_memory() noexcept;

  // The entries of the index file, until they are taken.
  std::vector<std::int32_t> lengths;
  std::vector<std::int8_t> modes;
  std::vector<std::int64_t> document_ends;

  std::int64_t num_sequences = 0;
  std::int64_t num_documents = 0;
  std::int64_t num_tokens = 0;      // of all sequences
  bool has_open_document = false;  // whether some sequences belong to no document yet

 private:
  // A number of the file's dtype.
  using Type = std::variant<std::uint8_t, std::int8_t, std::int16_t, std::uint16_t, std::int32_t,
                            std::int64_t, float, double>;

  static Type type_named(const std::string& dtype);
  [[noreturn]] void refuse(const std::string& token) const;
  void make_room(std::size_t size) {
    if (bytes_.size - used_ < size) {
      grow(used_ + size);
    }
  }
  void grow(std::size_t size);
  void end_sequence(std::int64_t length, std::int8_t mode);

  std::string dtype_;
  Type type_;
  bool has_modes_;
  std::size_t capacity_;
  Buffer<std::uint8_t> bytes_;
  std::int64_t num_loose_ = 0;  // tokens that belong to no sequence yet
  std::size_t used_ = 0;        // a multiple of the token's width, so that tokens stay aligned
  WriteBehind writer_;
};

template <class From>
void TokenBuffer::append(std::span<const From> tokens) {
  std::visit(
      [&]<class To>(To) {
        make_room(tokens.size() * sizeof(To));
        To* out = reinterpret_cast<To*>(data() + used_);
        if constexpr (std::is_same_v<From, To>) {
          std::copy(tokens.begin(), tokens.end(), out);
        } else if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
          const std::size_t place = narrow(tokens, out);
          if (place < tokens.size()) {
            refuse(std::to_string(tokens[place]));
          }
        } else {
          fail("tokens are not ", dtype_);
        }
        used_ += tokens.size() * sizeof(To);
        num_loose_ += static_cast<std::int64_t>(tokens.size());
      },
      type_);
}

}  // namespace millrace
