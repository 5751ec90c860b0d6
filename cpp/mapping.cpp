#include "mapping.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>

namespace millrace {
namespace {

// A signal handler takes no arguments from us, so these are globals: the reads of this thread, the
// innermost first; the handler that ours has replaced; and the address of this thread's last error that
// was handed on to it.
thread_local MappedRead* innermost = nullptr;
struct sigaction previous = {};
thread_local const void* handed_on = nullptr;
std::mutex installing;

void on_bus_error(int number, siginfo_t* info, void* context) {
  if (innermost != nullptr) {
    siglongjmp(innermost->jump, 1);
  }
  const bool is_sent = info->si_code <= 0;  // by kill or raise: no read is tried again
  // A handler that has come between two of our installations hands back to us, and one that has been
  // taken out does nothing: the same error a second time ends the process.
  const bool is_back = handed_on != nullptr && (is_sent || info->si_addr == handed_on);
  const bool has_handler = (previous.sa_flags & SA_SIGINFO) != 0 ||
                           (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN);
  if (is_back || !has_handler) {
    struct sigaction plain = {};
    plain.sa_handler = is_back ? SIG_DFL : previous.sa_handler;
    (void)::sigaction(number, &plain, nullptr);
    if (is_sent) {
      (void)::raise(number);
    }
    return;  // the read is tried again, and ends the process
  }
  handed_on = info->si_addr;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(number, info, context);
  } else {
    previous.sa_handler(number);
  }
}

// Others set handlers too (torch in its DataLoader's workers, faulthandler), so we check that ours is
// still installed. That takes half a microsecond, the coarse clock a hundredth: once a tick (4 ms) is
// enough.
void install() {
#ifdef CLOCK_MONOTONIC_COARSE
  constexpr clockid_t clock = CLOCK_MONOTONIC_COARSE;
#else
  constexpr clockid_t clock = CLOCK_MONOTONIC;
#endif
  static std::atomic<std::int64_t> last_check = -1;
  timespec now = {};
  (void)::clock_gettime(clock, &now);
  const std::int64_t tick = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  if (last_check.load(std::memory_order_acquire) == tick) {
    return;
  }
  const std::lock_guard<std::mutex> guard(installing);
  struct sigaction present = {};
  (void)::sigaction(SIGBUS, nullptr, &present);
  if ((present.sa_flags & SA_SIGINFO) == 0 || present.sa_sigaction != on_bus_error) {
    previous = present;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    // Not blocked while it runs, as it may end in a jump; on the thread's other stack, if it has one.
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    (void)::sigaction(SIGBUS, &ours, nullptr);
  }
  last_check.store(tick, std::memory_order_release);
}

}  // namespace

const std::uint8_t* map_file(int descriptor, std::size_t size) {
  void* start = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap");
  }
  return static_cast<const std::uint8_t*>(start);
}

void unmap_file(const std::uint8_t* start, std::size_t size) noexcept {
  (void)::munmap(const_cast<std::uint8_t*>(start), size);
}

MappedRead::MappedRead() : outer_(innermost) {
  install();
  innermost = this;
  handed_on = nullptr;
}

MappedRead::~MappedRead() { innermost = outer_; }

}  // namespace millrace
