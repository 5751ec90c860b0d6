// Mapped files, and reads of them that end in an error where the file has become shorter.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "errors.hpp"

namespace millrace {

// Maps the first `size` bytes of an open file, read-only; the descriptor is not kept. Throws
// std::system_error.
const std::uint8_t* map_file(int descriptor, std::size_t size);
void unmap_file(const std::uint8_t* start, std::size_t size) noexcept;

// Mapped pages that a file no longer has, or that its storage cannot deliver, raise SIGBUS, which
// ends the process. While one of these lives, a SIGBUS of its thread comes back to where its `jump`
// was set instead; any other SIGBUS goes to the handler before ours.
class MappedRead {
 public:
  MappedRead();
  ~MappedRead();
  MappedRead(const MappedRead&) = delete;
  MappedRead& operator=(const MappedRead&) = delete;

  sigjmp_buf jump;

 private:
  MappedRead* outer_;
};

// A page of a mapped file that can no longer be read.
class LostPage : public BadData {
 public:
  LostPage()
      : BadData(
            "a mapped file has become shorter, or its storage fails: a page of it cannot be read. "
            "Restore the file; files that are mapped are replaced by renames, never cut short") {}
};

// Runs `work`, which reads mapped files. A jump may end it in the middle: it must create nothing that
// needs a destructor, and fill what its caller owns. Throws LostPage if a page cannot be read.
template <class Work>
void read_mapped(Work&& work) {
  MappedRead read;
  if (sigsetjmp(read.jump, 0) != 0) {
    throw LostPage();
  }
  std::forward<Work>(work)();
}

}  // namespace millrace
