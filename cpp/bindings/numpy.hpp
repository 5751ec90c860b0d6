// NumPy's own header, for views alone: NumPy makes one in half the time of Python's a[i:j], and
// nanobind's arrays take several times longer. module.cpp imports NumPy for all files.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL millrace_numpy
#ifndef MILLRACE_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
