// The module and its errors.
#include <cerrno>
#include <exception>
#include <system_error>

#include "arrays.hpp"
#include "mapping.hpp"

NB_MODULE(_core, module) {
  using namespace millrace;
  // What nanobind takes for a leak at the end of Python is alive by right: a DataLoader's worker, or
  // any daemon thread, holds its dataset until the process is gone, plain Python objects included.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    } catch (const BadData& error) {
      PyErr_SetString(nb::module_::import_("millrace.errors").attr("DataError").ptr(),
                      error.what());
    }
  });
  add_order(module);
  add_tokens(module);
  add_buffer(module);
  add_samples(module);
  add_transforms(module);
}
