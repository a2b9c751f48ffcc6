// What the storage engines ask of the operating system, as os.h is for memory: production passes
// linux_disk(), tests pass a disk that breaks on cue.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace penstock {

struct Disk {
  virtual ~Disk() = default;

  // Bytes moved, fewer than asked for if the kernel says so, or a negative errno. Called from many
  // threads at once.
  virtual ssize_t read(int fd, std::byte* at, std::size_t bytes, std::uint64_t offset) noexcept = 0;
  virtual ssize_t write(int fd, const std::byte* at, std::size_t bytes,
                        std::uint64_t offset) noexcept = 0;

  // Takes the space of [0, bytes) now, so that no later write can find the disk full. 0 or an
  // errno.
  virtual int allocate(int fd, std::uint64_t bytes) noexcept = 0;
};

// The real one. Stateless, so one serves every thread.
Disk& linux_disk() noexcept;

}  // namespace penstock
