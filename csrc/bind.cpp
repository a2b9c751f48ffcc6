// Python bindings of memory, arenas and probes. Like the other bind*.cpp files, this one contains
// no logic: it converts arguments, releases the GIL and translates exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <system_error>

#include "arena.h"
#include "bind_store.h"
#include "cuda_driver.h"
#include "isa.h"
#include "residency.h"
#include "stream.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

nb::handle arena_full;  // Python exceptions whose args are numbers; Python code adds the names
nb::handle arena_busy;
nb::handle cuda_error;

void raise(nb::handle type, const nb::tuple& args) { PyErr_SetObject(type.ptr(), args.ptr()); }

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const ArenaFull& full) {
    raise(arena_full, nb::make_tuple(full.wanted, full.free));
  } catch (const ArenaBusy& busy) {
    raise(arena_busy, nb::make_tuple(busy.live));
  } catch (const CudaError& failed) {
    raise(cuda_error, nb::make_tuple(failed.code, failed.what()));
  } catch (const std::system_error& failed) {
    raise(PyExc_OSError, nb::make_tuple(failed.code().value(), failed.what()));
  }
}

// Lets torch.frombuffer and memoryview read a block in place. The view keeps the block alive, and
// the block keeps the memory mapped.
int block_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  auto* block = nb::inst_ptr<Block>(nb::handle{self});
  return PyBuffer_FillInfo(view, self, block->data(), static_cast<Py_ssize_t>(block->bytes()),
                           /*readonly=*/0, flags);
}

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(block_getbuffer)},
                             {0, nullptr}};

std::uintptr_t address(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

// Releasing gigabytes takes seconds, and releasing pinned memory waits for the GPU, so other Python
// threads must be able to run meanwhile.
void free_without_gil(Region* region) {
  if (nb::is_alive() && PyGILState_Check() != 0) {
    const nb::gil_scoped_release no_gil;
    delete region;
  } else {
    delete region;
  }
}

void bind_enums(nb::module_& m) {
  nb::enum_<Huge>(m, "Huge")
      .value("none", Huge::none)
      .value("transparent", Huge::transparent)
      .value("reserved", Huge::reserved);
  nb::enum_<Policy>(m, "Policy")
      .value("local", Policy::local)
      .value("bind", Policy::bind)
      .value("interleave", Policy::interleave);
  nb::enum_<Pin>(m, "Pin")
      .value("none", Pin::none)
      .value("locked", Pin::locked)
      .value("registered", Pin::registered);
}

void bind_memory(nb::module_& m) {
  nb::class_<Placement>(m, "Placement")
      .def(
          "__init__",
          [](Placement* self, Policy policy, std::vector<int> nodes, std::vector<int> pattern) {
            new (self) Placement{policy, std::move(nodes), std::move(pattern)};
          },
          nb::arg("policy"), nb::arg("nodes"), nb::arg("pattern"));

  nb::class_<Region>(m, "Region")
      .def(nb::new_([](std::size_t nbytes, Placement placement, Huge huge, bool prefault,
                       unsigned threads, NodeCpus cpus, int fd) {
             const nb::gil_scoped_release no_gil;
             return std::shared_ptr<Region>{new Region{{nbytes, std::move(placement), huge,
                                                        prefault, threads, std::move(cpus), fd},
                                                       linux_os()},
                                            free_without_gil};
           }),
           nb::arg("nbytes"), nb::arg("placement"), nb::arg("huge"), nb::arg("prefault"),
           nb::arg("threads"), nb::arg("cpus"), nb::arg("fd") = -1)
      .def_static(
          "at", [](std::uintptr_t at) { return Region::at(reinterpret_cast<const void*>(at)); },
          nb::arg("address"))
      .def_prop_ro("address", [](const Region& r) { return address(r.data()); })
      .def_prop_ro("nbytes", &Region::bytes)
      .def_prop_ro("mapped_nbytes", &Region::mapped_bytes)
      .def_prop_ro("pin", &Region::pinned)
      .def("lock", &Region::lock, NoGil())
      .def(
          "register", [](Region& r) { r.register_with(cuda_registrar()); }, NoGil())
      .def("move", &Region::move, nb::arg("offset"), nb::arg("nbytes"), nb::arg("to"), NoGil());

  nb::class_<Block>(m, "Block", nb::type_slots(block_slots))
      .def(
          "__init__",
          [](Block* self, std::shared_ptr<Region> region) {
            const std::size_t bytes = region->bytes();
            new (self) Block{std::move(region), 0, bytes};
          },
          nb::arg("region"))
      .def_prop_ro("address", [](const Block& b) { return address(b.data()); })
      .def_prop_ro("offset", &Block::offset)
      .def_prop_ro("nbytes", &Block::bytes)
      .def_prop_ro("region", &Block::region);

  nb::class_<Arena>(m, "Arena")
      .def(nb::new_([](std::shared_ptr<Region> region) {
             return std::make_shared<Arena>(std::move(region));
           }),
           nb::arg("region"))
      .def("take", &Arena::take, nb::arg("nbytes"), nb::arg("align"))
      .def("reset", &Arena::reset)
      .def_prop_ro("region", &Arena::region)
      .def_prop_ro("capacity", &Arena::capacity)
      .def_prop_ro("used", &Arena::used)
      .def_prop_ro("padding", &Arena::padding)
      .def_prop_ro("peak", &Arena::peak)
      .def_prop_ro("live", &Arena::live);
}

void bind_questions(nb::module_& m) {
  m.def(
      "count_pages",
      [](std::uintptr_t at, std::size_t nbytes, unsigned threads) {
        return count_pages(linux_os(), reinterpret_cast<void*>(at), nbytes, threads);
      },
      nb::arg("address"), nb::arg("nbytes"), nb::arg("threads"), NoGil());
  m.def(
      "migrate_pages",
      [](std::uintptr_t at, std::size_t nbytes, const Placement& to, unsigned threads) {
        return migrate_pages(linux_os(), reinterpret_cast<void*>(at), nbytes, to, kUnitBytes,
                             threads);
      },
      nb::arg("address"), nb::arg("nbytes"), nb::arg("to"), nb::arg("threads"), NoGil());
  m.def("page_nbytes", [] { return linux_os().page_bytes(); });
  m.def("map_blocks_from", &map_blocks_from, nb::arg("nbytes"));
  m.def("io_uring_errno", &io_uring_errno);
  m.def("cuda_devices", [] { return find_cuda().num_devices; }, NoGil());
  m.def("cuda_why_none", [] { return find_cuda().why_none; }, NoGil());
  m.def("isa_name", [] { return std::string{name_of(best_isa())}; });
  m.def("isa_names", [] {
    std::vector<std::string> names;
    for (const Isa isa : usable_isas()) names.emplace_back(name_of(isa));
    return names;
  });
}

Isa isa_of(const std::string& name) {
  for (const Isa isa : usable_isas()) {
    if (name == name_of(isa)) return isa;
  }
  throw std::invalid_argument{"this processor has no " + name};
}

void bind_stream(nb::module_& m) {
  nb::enum_<StreamOp>(m, "StreamOp")
      .value("read", StreamOp::read)
      .value("write", StreamOp::write)
      .value("copy", StreamOp::copy);
  m.attr("CHASE_STEP_NBYTES") = kChaseStep;
  m.def(
      "stream",
      [](StreamOp op, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes,
         unsigned threads, std::vector<int> cpus, unsigned passes, const std::string& isa) {
        return stream(linux_os(),
                      StreamSpec{op, reinterpret_cast<std::byte*>(target),
                                 reinterpret_cast<const std::byte*>(source), nbytes, threads,
                                 std::move(cpus), passes},
                      isa.empty() ? best_isa() : isa_of(isa));
      },
      nb::arg("op"), nb::arg("target"), nb::arg("source"), nb::arg("nbytes"), nb::arg("threads"),
      nb::arg("cpus"), nb::arg("passes"), nb::arg("isa") = "", NoGil());
  m.def(
      "lay_chase",
      [](std::uintptr_t at, std::size_t nbytes) {
        lay_chase(reinterpret_cast<std::byte*>(at), nbytes);
      },
      nb::arg("address"), nb::arg("nbytes"), NoGil());
  m.def(
      "chase",
      [](std::uintptr_t at, std::size_t stop, std::size_t hops, const std::vector<int>& cpus) {
        return chase(linux_os(), reinterpret_cast<const std::byte*>(at), stop, hops, cpus);
      },
      nb::arg("address"), nb::arg("stop"), nb::arg("hops"), nb::arg("cpus"), NoGil());
}

}  // namespace

void bind_sweep(nb::module_& m);   // bind_sweep.cpp
void bind_paging(nb::module_& m);  // bind_paging.cpp

NB_MODULE(_native, m) {
  // A tensor that lives until the process exits keeps its block until then. nanobind would report
  // this as a leak on every exit, although it is none.
  nb::set_leak_warnings(false);
  m.attr("UNIT_NBYTES") = kUnitBytes;
  arena_full = nb::exception<ArenaFull>(m, "ArenaFull", PyExc_MemoryError).release();
  arena_busy = nb::exception<ArenaBusy>(m, "ArenaBusy", PyExc_RuntimeError).release();
  cuda_error = nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError).release();
  nb::register_exception_translator(translate);
  bind_enums(m);
  bind_memory(m);
  bind_questions(m);
  bind_stream(m);
  bind_store(m);
  bind_sweep(m);
  bind_paging(m);
}
