// Memory for a kernel's output.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <span>

namespace millrace {

struct FreeMemory {
  void operator()(void* pointer) const noexcept { std::free(pointer); }
};

// An uninitialised array of `size` numbers that its holder owns.
template <class T>
struct Buffer {
  std::unique_ptr<T[], FreeMemory> data;
  std::size_t size = 0;

  std::span<T> span() noexcept { return {data.get(), size}; }
};

// Large arrays ask for huge pages: a shuffle of 100 M elements touches memory at random, and with
// 4 KiB pages nearly every touch misses the TLB too.
template <class T>
Buffer<T> allocate(std::size_t size) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  if (size > (std::numeric_limits<std::size_t>::max() - huge_page) / sizeof(T)) {
    throw std::bad_alloc();
  }
  const std::size_t bytes = size * sizeof(T);
  void* memory = nullptr;
  if (bytes >= 4 * huge_page) {
    memory = std::aligned_alloc(huge_page, (bytes + huge_page - 1) / huge_page * huge_page);
#ifdef MADV_HUGEPAGE
    if (memory != nullptr) {
      (void)madvise(memory, bytes, MADV_HUGEPAGE);  // advice: where it is refused, nothing is lost
    }
#endif
  } else {
    memory = std::malloc(bytes > 0 ? bytes : 1);
  }
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return {std::unique_ptr<T[], FreeMemory>(static_cast<T*>(memory)), size};
}

}  // namespace millrace
