// Python bindings of the optimizer sweep. Contains no logic: it converts arguments and releases the
// GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>

#include "sweep.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

Isa isa_of(const std::string& name) {
  if (name.empty()) return best_isa();
  for (const Isa isa : usable_isas()) {
    if (name == name_of(isa)) return isa;
  }
  throw std::invalid_argument{"this processor has no " + name};
}

template <class T>
T* pointer(std::uintptr_t at) {
  return reinterpret_cast<T*>(at);
}

// Seconds on the clock of Python's time.perf_counter: both are the monotonic clock.
double seconds_of(Job::Clock::time_point when) {
  return std::chrono::duration<double>{when.time_since_epoch()}.count();
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> pair_of(const Spot& spot) {
  if (spot.segment == kNowhere) return std::nullopt;
  return std::pair{spot.segment, spot.index};
}

void bind_formats(nb::module_& m) {
  nb::enum_<Rule>(m, "Rule")
      .value("adamw", Rule::adamw)
      .value("sgd", Rule::sgd)
      .value("lion", Rule::lion);
  nb::enum_<GradType>(m, "GradType")
      .value("bf16", GradType::bf16)
      .value("fp16", GradType::fp16)
      .value("fp32", GradType::fp32);
  nb::enum_<MasterType>(m, "MasterType")
      .value("split", MasterType::split)
      .value("single", MasterType::single)
      .value("half", MasterType::half);
  nb::enum_<MomentType>(m, "MomentType")
      .value("none", MomentType::none)
      .value("fp32", MomentType::fp32)
      .value("bf16", MomentType::bf16)
      .value("int8", MomentType::int8);
  nb::enum_<Part>(m, "SweepPart")
      .value("all", Part::all)
      .value("weights", Part::weights)
      .value("moments", Part::moments)
      .value("checked", Part::checked);
  m.attr("SWEEP_LEAF") = kLeaf;
  m.attr("SWEEP_LANES") = kLanes;
  m.attr("SWEEP_MOMENT_BLOCK") = kMomentBlock;
}

void bind_segment(nb::module_& m) {
  nb::class_<Coefficients>(m, "Coefficients")
      .def(
          "__init__",
          [](Coefficients* self, float scale, float l2, float decay, float rate, float fresh1,
             float fresh2, float eps, float keep, bool look) {
            new (self)
                Coefficients{scale, l2, decay, rate, fresh1, fresh2, eps, keep, look ? 1.0F : 0.0F};
          },
          nb::kw_only(), nb::arg("scale"), nb::arg("l2"), nb::arg("decay"), nb::arg("rate"),
          nb::arg("fresh1"), nb::arg("fresh2"), nb::arg("eps"), nb::arg("keep"), nb::arg("look"));
  nb::class_<Segment>(m, "Segment")
      .def(
          "__init__",
          [](Segment* self, std::size_t count, std::uint64_t first_index, std::uint64_t key,
             std::uintptr_t grad, std::uintptr_t weight, std::uintptr_t rest, std::uintptr_t first,
             std::uintptr_t second, std::uintptr_t first_bases, std::uintptr_t second_bases,
             const Coefficients& by) {
            new (self) Segment{count,
                               first_index,
                               pointer<const void>(grad),
                               pointer<void>(weight),
                               pointer<void>(rest),
                               pointer<void>(first),
                               pointer<void>(second),
                               pointer<std::int16_t>(first_bases),
                               pointer<std::int16_t>(second_bases),
                               key,
                               by};
          },
          nb::kw_only(), nb::arg("count"), nb::arg("first_index"), nb::arg("key"), nb::arg("grad"),
          nb::arg("weight"), nb::arg("rest"), nb::arg("first"), nb::arg("second"),
          nb::arg("first_bases"), nb::arg("second_bases"), nb::arg("by"));
}

void bind_jobs(nb::module_& m) {
  nb::class_<SegmentJob>(m, "SweepJob")
      .def("wait", &SegmentJob::wait, NoGil())
      .def_prop_ro("done", &SegmentJob::done)
      .def_prop_ro("began", [](const SegmentJob& job) { return seconds_of(job.began()); })
      .def_prop_ro("ended", [](const SegmentJob& job) { return seconds_of(job.ended()); })
      .def_prop_ro("sum_squares_limbs",
                   [](const SegmentJob& job) { return job.result().sum_squares.limbs(); })
      .def_prop_ro("max_bits", [](const SegmentJob& job) { return job.result().max_bits; })
      .def_prop_ro("bad_grad", [](const SegmentJob& job) { return pair_of(job.result().bad_grad); })
      .def_prop_ro("bad_master",
                   [](const SegmentJob& job) { return pair_of(job.result().bad_master); });
  m.def(
      "sweep_overlap",
      [](const std::vector<Segment>& segments, Rule rule, GradType grad, MasterType master,
         MomentType moments)
          -> std::optional<std::tuple<std::size_t, std::string, std::size_t, std::string>> {
        const auto found = find_overlap(segments, {rule, grad, master, moments});
        if (!found) return std::nullopt;
        return std::tuple{found->segment, found->role, found->other_segment, found->other_role};
      },
      nb::arg("segments"), nb::arg("rule"), nb::arg("grad"), nb::arg("master"), nb::arg("moments"));
}

template <class Kind>
std::shared_ptr<SegmentJob> start(Pool& pool, std::vector<Segment> segments, GradType grad,
                                  const std::string& isa) {
  auto job = std::make_shared<Kind>(std::move(segments), grad, isa_of(isa));
  pool.start(job);
  return job;
}

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "SweepPool")
      .def(nb::new_([](unsigned threads, std::vector<int> cpus, int nice) {
             return std::make_shared<Pool>(linux_os(), threads, std::move(cpus), nice);
           }),
           nb::arg("threads"), nb::arg("cpus"), nb::arg("nice"))
      .def_prop_ro("threads", &Pool::threads)
      .def(
          "sweep",
          [](Pool& pool, std::vector<Segment> segments, Rule rule, GradType grad, MasterType master,
             MomentType moments, bool stats, const std::string& isa, bool beside,
             Part part) -> std::shared_ptr<SegmentJob> {
            auto job = std::make_shared<SweepJob>(std::move(segments),
                                                  SweepFormat{rule, grad, master, moments, part},
                                                  stats, isa_of(isa));
            pool.start(job, beside);
            return job;
          },
          nb::arg("segments"), nb::arg("rule"), nb::arg("grad"), nb::arg("master"),
          nb::arg("moments"), nb::arg("stats"), nb::arg("isa") = "", nb::arg("beside") = false,
          nb::arg("part") = Part::all, NoGil())
      .def("stats", &start<StatsJob>, nb::arg("segments"), nb::arg("grad"), nb::arg("isa") = "",
           NoGil())
      .def("mix", &start<MixJob>, nb::arg("segments"), nb::arg("grad"), nb::arg("isa") = "",
           NoGil());
}

}  // namespace

void bind_sweep(nb::module_& m) {
  bind_formats(m);
  bind_segment(m);
  bind_jobs(m);
  bind_pool(m);
}
