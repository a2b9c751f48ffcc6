// Python bindings of the storage engines. Contains no logic: it converts arguments, releases the
// GIL and translates exceptions. Buffers are plain addresses here; the Python ticket keeps the
// objects alive that own them.
#include "bind_store.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "crc32c.h"
#include "engine.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

class BufferView {  // a contiguous buffer, held while its address is in use
 public:
  BufferView(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw nb::python_error{};
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  std::byte* at() const noexcept { return static_cast<std::byte*>(view_.buf); }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// (file, offset in the file, offset in the buffer, nbytes, offset in the extent)
using PieceTuple = std::tuple<unsigned, std::uint64_t, std::size_t, std::size_t, std::uint64_t>;
using FailureTuple = std::tuple<int, unsigned, std::uint64_t, std::uint64_t, std::size_t>;
using HangingTuple = std::tuple<bool, unsigned, std::uint64_t, std::size_t>;

std::unique_ptr<Engine> make_engine(const std::string& kind, EngineOptions options) {
  return kind == "io_uring" ? make_ring_engine(std::move(options), linux_ring)
                            : make_thread_engine(std::move(options), linux_disk());
}

std::shared_ptr<Transfer> start(Engine& engine, bool write, std::uintptr_t address,
                                const std::vector<PieceTuple>& tuples,
                                std::shared_ptr<Checksums> checksums) {
  std::vector<Piece> pieces;
  pieces.reserve(tuples.size());
  auto* base = reinterpret_cast<std::byte*>(address);
  for (const auto& [file, offset, into, bytes, place] : tuples) {
    pieces.push_back({file, offset, base + into, bytes, place});
  }
  return engine.start(write ? Op::write : Op::read, pieces, std::move(checksums));
}

std::vector<HangingTuple> close(Engine& engine, double seconds) {
  std::vector<HangingTuple> hanging;
  for (const Hanging& h : engine.close(seconds)) {
    hanging.emplace_back(h.op == Op::write, h.file, h.offset, h.bytes);
  }
  return hanging;
}

std::optional<FailureTuple> failure_of(const Transfer& transfer) {
  const Failure f = transfer.failure();
  if (f.error == 0) return std::nullopt;
  return FailureTuple{f.error, f.file, f.offset, f.place, f.bytes};
}

void bind_engine(nb::module_& m) {
  nb::class_<Checksums>(m, "Checksums")
      .def(nb::new_([](std::uint64_t nbytes, std::size_t unit) {
             return std::make_shared<Checksums>(nbytes, unit);
           }),
           nb::arg("nbytes"), nb::arg("unit"))
      .def("note_zeros", &Checksums::note_zeros, NoGil());

  nb::class_<Transfer>(m, "Transfer")
      .def_prop_ro("done", &Transfer::done)
      // Seconds on the clock of Python's time.perf_counter: both are the monotonic clock.
      .def_prop_ro("ended",
                   [](const Transfer& transfer) {
                     const auto since = transfer.ended().time_since_epoch();
                     return std::chrono::duration<double>{since}.count();
                   })
      .def_prop_ro("failure", &failure_of);

  nb::class_<Engine>(m, "StoreEngine")
      .def(nb::new_([](const std::string& kind, std::vector<int> files, std::size_t align,
                       std::size_t request_nbytes, unsigned depth, unsigned workers) {
             const nb::gil_scoped_release no_gil;
             return make_engine(kind,
                                {std::move(files), align, request_nbytes, depth, workers, {}});
           }),
           nb::arg("kind"), nb::arg("files"), nb::arg("align"), nb::arg("request_nbytes"),
           nb::arg("depth"), nb::arg("workers"))
      .def("start", &start, nb::arg("write"), nb::arg("address"), nb::arg("pieces"),
           nb::arg("checksums").none(), NoGil())
      .def(
          "wait",
          [](Engine& e, const std::vector<std::shared_ptr<Transfer>>& transfers, bool all,
             double seconds) { return e.queue().wait(transfers, all, seconds); },
          nb::arg("transfers"), nb::arg("all"), nb::arg("seconds"), NoGil())
      .def("close", &close, nb::arg("seconds"), NoGil())
      .def(
          "register_memory",
          [](Engine& e, std::uintptr_t address, std::size_t nbytes) {
            return e.register_memory(reinterpret_cast<std::byte*>(address), nbytes);
          },
          nb::arg("address"), nb::arg("nbytes"), NoGil())
      .def_prop_ro("counters", [](Engine& e) {
        const Counters c = e.queue().counters();
        return std::make_tuple(c.read_bytes, c.written_bytes, c.requests, c.again);
      });
}

}  // namespace

void bind_store(nb::module_& m) {
  m.attr("END_OF_FILE") = kEndOfFile;
  m.attr("BAD_CHECKSUM") = kBadChecksum;
  m.attr("NEVER_WRITTEN") = kNeverWritten;
  nb::exception<EngineClosed>(m, "EngineClosed", PyExc_RuntimeError);
  bind_engine(m);
  m.def(
      "buffer_span",
      [](nb::handle object, bool writable) {
        const BufferView view{object, writable};
        return std::make_pair(reinterpret_cast<std::uintptr_t>(view.at()), view.bytes());
      },
      nb::arg("buffer"), nb::arg("writable"));
  m.def(
      "crc32c",
      [](nb::handle buffer, std::uint32_t before, const std::string& variant) {
        const BufferView view{buffer, /*writable=*/false};
        const nb::gil_scoped_release no_gil;
        for (const Crc32cVariant& one : crc32c_variants()) {
          if (one.name == variant) return one.run(view.at(), view.bytes(), before);
        }
        if (!variant.empty()) throw std::invalid_argument{"no such variant here: " + variant};
        return crc32c(view.at(), view.bytes(), before);
      },
      nb::arg("buffer"), nb::arg("before") = 0, nb::arg("variant") = "");
  m.def("crc32c_variants", [] {
    std::vector<std::string> names;
    for (const Crc32cVariant& variant : crc32c_variants()) names.emplace_back(variant.name);
    return names;
  });
  m.def("crc32c_is_hardware", &crc32c_is_hardware);
  m.def(
      "allocate_space",
      [](int fd, std::uint64_t nbytes) { return linux_disk().allocate(fd, nbytes); }, nb::arg("fd"),
      nb::arg("nbytes"), NoGil());
}
