// The operating system's file interface for the storage engines, as os.h is for memory. Production
// code passes linux_disk(), tests pass a disk that fails on demand.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace penstock {

struct Disk {
  virtual ~Disk() = default;

  // Returns the number of bytes moved, which may be fewer than requested, or a negative errno.
  // Called from many threads concurrently.
  virtual ssize_t read(int fd, std::byte* at, std::size_t bytes, std::uint64_t offset) noexcept = 0;
  virtual ssize_t write(int fd, const std::byte* at, std::size_t bytes,
                        std::uint64_t offset) noexcept = 0;

  // Allocates the space of [0, bytes) now, so that no later write can find the disk full. Returns 0
  // or an errno.
  virtual int allocate(int fd, std::uint64_t bytes) noexcept = 0;
};

// The real implementation. It has no state, so one instance serves every thread.
Disk& linux_disk() noexcept;

}  // namespace penstock
