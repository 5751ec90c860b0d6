// Vector code that is chosen when the program starts: a wheel runs on any x86-64 machine, and uses
// what this one has. Elsewhere, and under sanitizers (whose runtime is not up when the choice is
// made), the macro is empty and the baseline code serves.
#pragma once

#include <cstdlib>  // defines __GLIBC__ where the C library is glibc, which makes the choice

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
// "flatten": what the function calls is compiled into each of its versions.
#define MILLRACE_VECTOR_CODE __attribute__((flatten, target_clones("default", "avx2", "avx512f")))
#define MILLRACE_VECTOR_BYTES 32  // of a vector type: GCC splits a wider one into single numbers
#else
#define MILLRACE_VECTOR_CODE
#define MILLRACE_VECTOR_BYTES 16
#endif
