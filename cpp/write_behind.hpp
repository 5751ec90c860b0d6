// A file that grows by whole buffers, written by a thread while the next one fills.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <future>

#include "buffer.hpp"

namespace millrace {

// Lets the kernel start to bring these bytes to the disk, so that less is left to do for an fsync.
// Left alone it would begin after seconds, or after gigabytes.
void start_writeback(int file, std::int64_t start, std::int64_t size);

class WriteBehind {
 public:
  // Duplicates the descriptor, so that no caller closes it in the middle of a write. A negative `file`:
  // no file, nothing can be written.
  explicit WriteBehind(int file);
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  // Swaps the buffer with the previous one (at first an empty one), and starts to write its first
  // `size` bytes. Call `wait` before.
  void start(Buffer<std::uint8_t>& buffer, std::size_t size);

  // Returns when all is written: 0, or the error number. After an error the state of the file is
  // unknown: write nothing more.
  int wait();

  // Waits, and gives up the descriptor and the memory: nothing can be written any more.
  void close();

 private:
  int file_;
  pid_t owner_;  // a forked child has this object, and not its thread
  Buffer<std::uint8_t> written_;
  std::future<int> result_;
};

}  // namespace millrace
