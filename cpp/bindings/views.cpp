// The sequences of a mapped token file as views of its one array of tokens.
#include "numpy.hpp"

#include "arrays.hpp"

namespace millrace {
namespace {

class PySequenceViews {
 public:
  PySequenceViews(const nb::object& tokens, const In<std::int64_t>& sequence_pointers,
                  const In<std::int32_t>& sequence_lengths)
      : array_(tokens), pointers_(sequence_pointers), lengths_(sequence_lengths) {
    if (!PyArray_Check(tokens.ptr()) || pointers_.shape(0) != lengths_.shape(0)) {
      fail("an array of tokens, and as many pointers as lengths are needed");
    }
    auto* base = reinterpret_cast<PyArrayObject*>(tokens.ptr());
    if (PyArray_NDIM(base) != 1 || !PyArray_IS_C_CONTIGUOUS(base)) {
      fail("tokens must be one contiguous run");
    }
    num_bytes_ = static_cast<std::int64_t>(PyArray_NBYTES(base));
    width_ = static_cast<std::int64_t>(PyArray_ITEMSIZE(base));
  }

  nb::object one(const nb::object& index) const {
    if (!PyIndex_Check(index.ptr())) {
      throw nb::type_error("a sequence's number is an integer");
    }
    const auto size = static_cast<std::int64_t>(lengths_.shape(0));
    std::int64_t number = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
    if (number == -1 && PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    number += number < 0 ? size : 0;
    if (number < 0 || number >= size) {
      throw nb::index_error(
          ("there is no such sequence; the dataset has 0 to " + std::to_string(size - 1)).c_str());
    }
    return view(static_cast<std::size_t>(number));
  }

  // The sequences start, start + step, ... before stop (after it, for a negative step). A slice's
  // step may be any int; one beyond 64 bits leads as far as the largest.
  nb::list many(std::int64_t start, std::int64_t stop, const nb::int_& any_step) const {
    const std::int64_t step = PyNumber_AsSsize_t(any_step.ptr(), nullptr);
    const auto size = static_cast<std::int64_t>(lengths_.shape(0));
    nb::list views;
    std::int64_t number = start;
    while (step > 0 ? number < stop : number > stop) {
      if (number < 0 || number >= size) {
        throw nb::index_error("the slice has not been cut to the dataset");
      }
      views.append(view(static_cast<std::size_t>(number)));
      if (__builtin_add_overflow(number, step, &number)) {
        break;  // such a step leads out of any slice
      }
    }
    return views;
  }

 private:
  nb::object view(std::size_t number) const {
    const std::int64_t pointer = column_of(pointers_)[number];
    npy_intp length = column_of(lengths_)[number];
    if (length < 0 || pointer < 0 || pointer % width_ != 0 ||
        pointer > num_bytes_ - length * width_) {
      fail("sequence ", number, " lies outside the token file or off its grid");
    }
    auto* base = reinterpret_cast<PyArrayObject*>(array_.ptr());
    PyArray_Descr* dtype = PyArray_DESCR(base);
    Py_INCREF(dtype);  // the new array takes a reference to it, and one to its base
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, dtype, 1, &length, nullptr,
                                           PyArray_BYTES(base) + pointer, 0, nullptr);
    if (array == nullptr) {
      throw nb::python_error();
    }
    nb::object result = nb::steal(array);
    Py_INCREF(base);
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array),
                              reinterpret_cast<PyObject*>(base)) < 0) {
      throw nb::python_error();
    }
    return result;
  }

  nb::object array_;
  In<std::int64_t> pointers_;
  In<std::int32_t> lengths_;
  std::int64_t num_bytes_ = 0;
  std::int64_t width_ = 1;
};

}  // namespace

void add_views(nb::module_& module) {
  nb::class_<PySequenceViews>(module, "SequenceViews")
      .def(nb::init<const nb::object&, const In<std::int64_t>&, const In<std::int32_t>&>(),
           "tokens"_a, "sequence_pointers"_a, "sequence_lengths"_a)
      .def("one", &PySequenceViews::one, "index"_a)
      .def("many", &PySequenceViews::many, "start"_a, "stop"_a, "step"_a);
}

}  // namespace millrace
