// The part of io_uring that the engine needs. Production code creates rings with linux_ring, tests
// pass a ring that answers from a failing disk.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "transfer.h"

namespace penstock {

constexpr unsigned kMaxBuffers = 256;
// The kernel registers at most this many bytes per buffer.
constexpr std::size_t kMaxBufferBytes = std::size_t{1} << 30;

struct Submission {
  Op op;
  unsigned file;  // index of a registered file
  std::uint64_t offset;
  std::byte* at;
  std::size_t bytes;
  int buffer;  // index of the registered buffer that contains it, or -1
  std::uint64_t tag;
};

struct Completion {
  std::uint64_t tag;
  ssize_t answer;
};

struct Ring {
  virtual ~Ring() = default;

  // Only one thread calls these three. At most `depth` submissions may be unanswered.
  virtual void push(const Submission& submission) noexcept = 0;
  // Submits what was pushed. With `wait`, returns only when there is an answer or after wake().
  // Returns 0 or a negative errno.
  virtual int enter(bool wait) noexcept = 0;
  virtual bool pop(Completion& completion) noexcept = 0;

  // May be called from any thread.
  virtual void wake() noexcept = 0;
  virtual int register_buffer(unsigned index, std::byte* at, std::size_t bytes) noexcept = 0;
};

using RingMaker = std::function<std::shared_ptr<Ring>(unsigned depth, std::span<const int> files)>;

// Throws std::system_error with the name of the call that the kernel refused.
std::shared_ptr<Ring> linux_ring(unsigned depth, std::span<const int> files);

}  // namespace penstock
