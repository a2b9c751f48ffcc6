// Pages and ranges, as Python sees them. Like bind.cpp it converts and drops the GIL: no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "paging.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

// Nothing is asked of the address, which may have no memory yet: torch asks a driver for the device
// of a bare pointer, and would be told that there is none. Nor does the view own anything: None
// stands for an owner, without which the bytes would be copied.
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
