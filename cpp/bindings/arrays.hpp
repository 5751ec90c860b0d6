// Arrays in, arrays out. The files of this folder alone know Python: they take arrays apart, release
// the GIL around each kernel, and make arrays of what it returns. nanobind checks shapes and dtypes
// (TypeError), src/millrace/_native.py checks ranges; the kernels check what only reading the arrays can
// show, and throw std::invalid_argument, which Python sees as ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "column.hpp"
#include "errors.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace millrace {

// The name of an argument that must have its type as it is: of another one, nanobind makes a copy.
inline auto operator""_array(const char* name, std::size_t) {
  return nb::arg(name).noconvert();
}

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;
using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
Column<T> column_of(const In<T>& array) {
  return {array.data(), array.shape(0)};
}

// For kernels that read plain arrays.
template <class T>
std::span<const T> span_of(const In<T>& array) {
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) != 0) {
    fail("an array is not aligned to its numbers' size");
  }
  return {array.data(), array.shape(0)};
}

template <class T>
Out<T> to_numpy(Buffer<T> buffer) {
  T* data = buffer.data.release();
  nb::capsule owner(data, [](void* pointer) noexcept { FreeMemory{}(pointer); });
  return Out<T>(data, {buffer.size}, owner);
}

// An array that `fill` fills, without the GIL.
template <class T, class Fill>
Out<T> make_array(std::size_t size, Fill fill) {
  auto buffer = allocate<T>(size);
  {
    nb::gil_scoped_release unlocked;
    fill(buffer.span());
  }
  return to_numpy(std::move(buffer));
}

// Each file of this folder adds its part to the module.
void add_buffer(nb::module_& module);
void add_order(nb::module_& module);
void add_samples(nb::module_& module);
void add_tokens(nb::module_& module);
void add_transforms(nb::module_& module);

}  // namespace millrace
