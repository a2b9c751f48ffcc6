// How fast memory is: passes over a range at the speed of the memory, and a chase through it that
// is as slow as its latency. For the probe; the step has its own kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "isa.h"
#include "os.h"

namespace penstock {

enum class StreamOp { read, write, copy };

// One set per instruction set (stream_kernels.cpp). Ranges may have any length and start anywhere;
// all sets give the same bytes and the same sums.
struct StreamKernels {
  // Exclusive or of the range's 8-byte words, the last one padded with zeros.
  std::uint64_t (*read)(const std::byte* at, std::size_t bytes) noexcept;
  // Both go round the caches where the processor can (non-temporal stores), as a copy of more than
  // the caches hold should.
  void (*write)(std::byte* at, std::size_t bytes, std::byte value) noexcept;
  void (*copy)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
};

// One this processor has; else std::invalid_argument.
const StreamKernels& stream_kernels(Isa isa);

struct StreamSpec {
  StreamOp op = StreamOp::read;
  std::byte* target = nullptr;        // unused by read
  const std::byte* source = nullptr;  // unused by write
  std::size_t bytes = 0;
  unsigned threads = 1;
  std::vector<int> cpus;  // where the threads may run; anywhere if empty
  unsigned passes = 1;
};

inline constexpr std::byte kStreamFill{0xA5};  // what a write pass leaves behind

// Seconds of each pass, from the first thread's start to the last one's finish. The threads start
// once, each keeps its part of the range, and all wait for each other between passes. Nothing can
// stop it midway: a caller that must stay interruptible asks for few passes at a time.
std::vector<double> stream(Os& os, const StreamSpec& spec, Isa isa);

inline constexpr std::size_t kChaseStep = 64;  // bytes from one stop to the next: a cache line

// Makes one random cycle of all cache lines in the range, the same each time. Needs two lines at
// least and an address that is a multiple of kChaseStep; else std::invalid_argument.
void lay_chase(std::byte* at, std::size_t bytes);

// Follows the cycle for `hops` loads, each of which has to wait for the one before. `stop` is where
// to begin (0 at first). Gives the seconds for all hops and where it ended: begin the next one
// there, or it finds its lines in the cache.
std::pair<double, std::size_t> chase(Os& os, const std::byte* at, std::size_t stop,
                                     std::size_t hops, const std::vector<int>& cpus);

}  // namespace penstock
