#include "write_behind.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "errors.hpp"

namespace millrace {
namespace {

int write_all(int file, const std::uint8_t* data, std::size_t size) {
  const off_t start = ::lseek(file, 0, SEEK_CUR);
  const std::size_t whole = size;
  while (size > 0) {
    const ssize_t count = ::write(file, data, size);
    if (count < 0 && errno != EINTR) {
      return errno;
    }
    if (count > 0) {
      data += count;
      size -= static_cast<std::size_t>(count);
    }
  }
  start_writeback(file, start, static_cast<std::int64_t>(whole));
  return 0;
}

}  // namespace

void start_writeback(int file, std::int64_t start, std::int64_t size) {
#ifdef SYNC_FILE_RANGE_WRITE
  (void)::sync_file_range(file, start, size, SYNC_FILE_RANGE_WRITE);  // where it cannot, fsync will
#else
  (void)file, (void)start, (void)size;
#endif
}

WriteBehind::WriteBehind(int file) : file_(file < 0 ? -1 : ::dup(file)), owner_(::getpid()) {
  if (file >= 0 && file_ < 0) {
    if (errno == EBADF) {
      fail("the file cannot be written to: it has no valid descriptor");
    }
    throw std::system_error(errno, std::generic_category(), "dup");
  }
}

WriteBehind::~WriteBehind() { close(); }

void WriteBehind::close() {
  if (owner_ == ::getpid()) {
    wait();
  } else if (result_.valid()) {
    // A wait would never end. The memory that the thread used is leaked with it.
    (void)new (std::nothrow) std::future<int>(std::move(result_));
    (void)written_.data.release();
  }
  written_ = {};
  if (file_ >= 0) {
    ::close(std::exchange(file_, -1));
  }
}

void WriteBehind::start(Buffer<std::uint8_t>& buffer, std::size_t size) {
  std::swap(buffer, written_);
  result_ = std::async(std::launch::async, write_all, file_, written_.data.get(), size);
}

int WriteBehind::wait() { return result_.valid() ? result_.get() : 0; }

}  // namespace millrace
