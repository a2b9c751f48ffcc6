// Python bindings of pages and address ranges. Contains no logic: it converts arguments and
// releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "paging.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

// Makes a view without a check of the address, which may have no memory yet: torch would ask the
// driver for the device of a bare pointer and get an error. The view owns nothing: None stands for
// an owner, because without one nanobind would copy the bytes.
nb::ndarray<std::uint8_t> bytes_at(std::uintptr_t at, std::size_t nbytes, int device_type,
                                   int device) {
  return {reinterpret_cast<void*>(at), {nbytes},    nb::none(), {},
          nb::dtype<std::uint8_t>(),   device_type, device};
}

}  // namespace

void bind_paging(nb::module_& m) {
  m.def("open_pages", &open_pages, nb::arg("name"));
  m.def("close_pages", &close_pages, nb::arg("fd"), NoGil());
  m.def("extend_pages", &extend_pages, nb::arg("fd"), nb::arg("nbytes"));
  m.def("commit_pages", &commit_pages, nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"),
        NoGil());
  m.def("punch_pages", &punch_pages, nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), NoGil());
  m.def("reserve_range", &reserve_range, nb::arg("nbytes"), nb::arg("align"));
  m.def("release_range", &release_range, nb::arg("address"), nb::arg("nbytes"), NoGil());
  m.def("map_pages", &map_pages, nb::arg("address"), nb::arg("nbytes"), nb::arg("fd"),
        nb::arg("offset"), nb::arg("writable"));
  m.def("unmap_pages", &unmap_pages, nb::arg("address"), nb::arg("nbytes"));
  m.def("bytes_at", &bytes_at, nb::arg("address"), nb::arg("nbytes"), nb::arg("device_type"),
        nb::arg("device"));
}
