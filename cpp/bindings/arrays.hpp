// Arrays in, arrays out. The files of this folder alone know Python: they take arrays apart, release
// the GIL around each kernel, and make arrays of what it returns. Shapes, dtypes and ranges are checked
// in src/millrace/_native.py; the kernels check what only reading the arrays can show, and throw
// std::invalid_argument, which Python sees as ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "column.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace millrace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
Column<T> column_of(const In<T>& array) {
  return {array.data(), array.shape(0)};
}

// For kernels that read plain arrays.
template <class T>
std::span<const T> span_of(const In<T>& array) {
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0) {
    throw std::invalid_argument("an array is not aligned to its numbers' size");
  }
  return {array.data(), array.shape(0)};
}

template <class T>
Out<T> to_numpy(Buffer<T> buffer, std::initializer_list<std::size_t> shape) {
  T* data = buffer.data.release();
  nb::capsule owner(data, [](void* pointer) noexcept { FreeMemory{}(pointer); });
  return Out<T>(data, shape, owner);
}

template <class T>
Out<T> to_numpy(Buffer<T> buffer) {
  const std::size_t size = buffer.size;
  return to_numpy(std::move(buffer), {size});
}

template <class T>
Out<T> to_numpy(const std::vector<T>& numbers) {
  auto out = allocate<T>(numbers.size());
  std::copy(numbers.begin(), numbers.end(), out.data.get());
  return to_numpy(std::move(out));
}

// Each file of this folder adds its part to the module.
void add_blend(nb::module_& module);
void add_buffer(nb::module_& module);
void add_order(nb::module_& module);
void add_samples(nb::module_& module);
void add_shuffle(nb::module_& module);
void add_tokens(nb::module_& module);
void add_views(nb::module_& module);

}  // namespace millrace
