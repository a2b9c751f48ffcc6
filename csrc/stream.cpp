#include "stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace penstock {

namespace baseline {
extern const StreamKernels stream_kernels;
}
#ifdef PENSTOCK_X86
namespace avx2 {
extern const StreamKernels stream_kernels;
}
namespace avx512 {
extern const StreamKernels stream_kernels;
}
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point first, Clock::time_point last) {
  return std::chrono::duration<double>(last - first).count();
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::atomic<std::uint64_t> sink;  // receives sums, so that the compiler cannot remove the reads

void run_once(const StreamKernels& kernels, const StreamSpec& spec, std::size_t offset,
              std::size_t bytes) {
  switch (spec.op) {
    case StreamOp::read:
      sink.fetch_xor(kernels.read(spec.source + offset, bytes), std::memory_order_relaxed);
      return;
    case StreamOp::write:
      return kernels.write(spec.target + offset, bytes, kStreamFill);
    case StreamOp::copy:
      return kernels.copy(spec.target + offset, spec.source + offset, bytes);
  }
}

// A barrier that spins. A thread that sleeps at a barrier starts tens of microseconds after the
// others, and on a large machine a whole pass takes not much longer. After a while it yields, in
// case there are more threads than processors.
class SpinBarrier {
 public:
  explicit SpinBarrier(unsigned threads) : threads_{threads} {}

  void arrive_and_wait() noexcept {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (unsigned spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins >= kSpins) std::this_thread::yield();
    }
  }

 private:
  static constexpr unsigned kSpins = 20'000;
  const unsigned threads_;
  std::atomic<unsigned> arrived_{0};
  std::atomic<unsigned> round_{0};
};

struct Lap {
  Clock::time_point start;
  Clock::time_point finish;
};

// Threads that start all together or not at all: they wait at a gate until the last one exists, so
// that a thread that the system refuses does not leave the others waiting at a barrier forever.
class Team {
 public:
  Team(Os& os, const StreamSpec& spec, const StreamKernels& kernels)
      : os_{os},
        spec_{spec},
        kernels_{kernels},
        together_{spec.threads},
        laps_(spec.threads, std::vector<Lap>(spec.passes)) {}

  const std::vector<std::vector<Lap>>& run() {
    std::vector<std::jthread> members;
    members.reserve(spec_.threads);
    try {
      for (unsigned i = 0; i < spec_.threads; ++i) members.emplace_back([this, i] { member(i); });
    } catch (...) {
      open(Gate::give_up);
      throw;
    }
    open(Gate::go);
    members.clear();
    return laps_;
  }

 private:
  enum class Gate { closed, go, give_up };

  void open(Gate state) noexcept {
    gate_ = state;
    gate_.notify_all();
  }

  void member(unsigned index) noexcept {
    if (!spec_.cpus.empty()) os_.run_on(spec_.cpus);
    gate_.wait(Gate::closed);
    if (gate_ == Gate::give_up) return;
    // Parts end on page boundaries, so that no two threads share a cache line.
    const std::size_t page = os_.page_bytes();
    const std::size_t part = round_up(round_up(spec_.bytes, spec_.threads) / spec_.threads, page);
    const std::size_t first = std::min(spec_.bytes, index * part);
    const std::size_t bytes = std::min(part, spec_.bytes - first);
    for (Lap& lap : laps_[index]) {
      together_.arrive_and_wait();
      lap.start = Clock::now();
      run_once(kernels_, spec_, first, bytes);
      lap.finish = Clock::now();
    }
  }

  Os& os_;
  const StreamSpec& spec_;
  const StreamKernels& kernels_;
  std::atomic<Gate> gate_{Gate::closed};
  SpinBarrier together_;
  std::vector<std::vector<Lap>> laps_;  // one list per thread, written only by that thread
};

// A fixed sequence (splitmix64), so that two probes of a machine follow the same path.
class Dice {
 public:
  std::size_t below(std::size_t bound) {
    state_ += 0x9E3779B97F4A7C15;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return static_cast<std::size_t>((x ^ (x >> 31)) % bound);
  }

 private:
  std::uint64_t state_ = 20;
};

std::size_t& next_of(std::byte* at, std::size_t stop) {
  return *reinterpret_cast<std::size_t*>(at + stop);
}

}  // namespace

const StreamKernels& stream_kernels(Isa isa) {
  const std::vector<Isa> usable = usable_isas();
  if (std::find(usable.begin(), usable.end(), isa) == usable.end()) {
    throw std::invalid_argument{std::string{"this processor has no "} + name_of(isa)};
  }
#ifdef PENSTOCK_X86
  if (isa == Isa::avx512) return avx512::stream_kernels;
  if (isa == Isa::avx2) return avx2::stream_kernels;
#endif
  return baseline::stream_kernels;
}

std::vector<double> stream(Os& os, const StreamSpec& spec, Isa isa) {
  if (spec.threads == 0) throw std::invalid_argument{"threads must be 1 or more"};
  Team team{os, spec, stream_kernels(isa)};
  const std::vector<std::vector<Lap>>& laps = team.run();
  std::vector<double> seconds;
  for (unsigned pass = 0; pass < spec.passes; ++pass) {
    Lap whole = laps.front()[pass];
    for (const std::vector<Lap>& lap : laps) {
      whole.start = std::min(whole.start, lap[pass].start);
      whole.finish = std::max(whole.finish, lap[pass].finish);
    }
    seconds.push_back(seconds_between(whole.start, whole.finish));
  }
  return seconds;
}

void lay_chase(std::byte* at, std::size_t bytes) {
  const std::size_t stops = bytes / kChaseStep;
  if (stops < 2) throw std::invalid_argument{"a chase needs two cache lines at least"};
  if (reinterpret_cast<std::uintptr_t>(at) % kChaseStep != 0) {
    throw std::invalid_argument{"a chase must begin on a cache line"};
  }
  for (std::size_t i = 0; i < stops; ++i) next_of(at, i * kChaseStep) = i * kChaseStep;
  // Sattolo's shuffle makes a single cycle. An ordinary shuffle could trap the chase in a short
  // one.
  Dice dice;
  for (std::size_t i = stops - 1; i > 0; --i) {
    std::swap(next_of(at, i * kChaseStep), next_of(at, dice.below(i) * kChaseStep));
  }
}

std::pair<double, std::size_t> chase(Os& os, const std::byte* at, std::size_t stop,
                                     std::size_t hops, const std::vector<int>& cpus) {
  double seconds = 0;
  // On a new thread, because the affinity of the calling thread must not change.
  std::jthread{[&] {
    if (!cpus.empty()) os.run_on(cpus);
    const auto start = Clock::now();
    for (std::size_t i = 0; i < hops; ++i) {
      stop = *reinterpret_cast<const std::size_t*>(at + stop);
    }
    seconds = seconds_between(start, Clock::now());
    sink.store(stop, std::memory_order_relaxed);
  }}.join();
  return {seconds, stop};
}

}  // namespace penstock
