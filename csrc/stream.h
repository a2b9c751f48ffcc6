// Measurements of memory: passes over a range for bandwidth, and a pointer chase for latency. Only
// the probe uses them; the optimizer step has its own kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "isa.h"
#include "os.h"

namespace penstock {

enum class StreamOp { read, write, copy };

// The kernels of one instruction set (stream_kernels.cpp). Ranges may have any length and
// alignment. All sets give the same bytes and the same sums.
struct StreamKernels {
  // Returns the exclusive or of the range's 8-byte words, with the last word padded with zeros.
  std::uint64_t (*read)(const std::byte* at, std::size_t bytes) noexcept;
  // Both bypass the caches where the processor can (non-temporal stores), as for a copy that is
  // larger than the caches.
  void (*write)(std::byte* at, std::size_t bytes, std::byte value) noexcept;
  void (*copy)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
};

// Throws std::invalid_argument if this processor does not support the instruction set.
const StreamKernels& stream_kernels(Isa isa);

struct StreamSpec {
  StreamOp op = StreamOp::read;
  std::byte* target = nullptr;        // unused by read
  const std::byte* source = nullptr;  // unused by write
  std::size_t bytes = 0;
  unsigned threads = 1;
  std::vector<int> cpus;  // CPUs for the threads; any CPU if empty
  unsigned passes = 1;
};

inline constexpr std::byte kStreamFill{0xA5};  // the byte that a write pass writes

// Returns the seconds of each pass, from the start of the first thread to the end of the last one.
// The threads are started once, each keeps its part of the range, and all wait for each other
// between passes. A pass cannot be interrupted: a caller that must stay interruptible requests few
// passes at a time.
std::vector<double> stream(Os& os, const StreamSpec& spec, Isa isa);

inline constexpr std::size_t kChaseStep = 64;  // bytes between two positions: a cache line

// Writes one random cycle over all cache lines of the range, which is the same each time. Throws
// std::invalid_argument unless there are at least two lines and the address is a multiple of
// kChaseStep.
void lay_chase(std::byte* at, std::size_t bytes);

// Follows the cycle for `hops` loads, each of which depends on the previous one. `stop` is the
// position to start from (0 at first). Returns the seconds of all hops and the final position, from
// which the next call should start: otherwise it would find its lines in the cache.
std::pair<double, std::size_t> chase(Os& os, const std::byte* at, std::size_t stop,
                                     std::size_t hops, const std::vector<int>& cpus);

}  // namespace penstock
