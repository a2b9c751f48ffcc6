// What the core asks of the operating system, as one small struct. Production passes LinuxOs; tests
// pass a liar that fails on cue. Nothing else in csrc/ makes a system call.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace penstock {

enum class Huge {
  none,         // base pages, also where the kernel would give huge ones by itself
  transparent,  // 2 MiB pages where the kernel finds them; falls back page by page
  reserved,     // 2 MiB pages from the pool the administrator set aside; all or nothing
};

enum class Policy {
  local,       // the kernel's default: the node of the thread that touches first
  bind,        // only these nodes, the nearest first
  interleave,  // page by page over these nodes
};

// A range of address space with an inaccessible page on either side, so that an overrun is a fault
// and the kernel cannot merge the range with a neighbour (residency is counted per range).
struct Mapping {
  void* at = nullptr;
  std::size_t bytes = 0;
  void* reserved_at = nullptr;
  std::size_t reserved_bytes = 0;
};

struct Os {
  virtual ~Os() = default;

  // All of these throw std::system_error with the failing call's name, except the noexcept ones.
  virtual Mapping map(std::size_t bytes, std::size_t align, Huge huge) = 0;
  virtual void unmap(const Mapping& mapping) noexcept = 0;

  // Policy for pages touched later; with `move`, pages already there are migrated too, and one that
  // cannot be is an error.
  virtual void bind(void* at, std::size_t bytes, Policy policy, std::span<const int> nodes,
                    bool move) = 0;

  // Gives every page of the range its memory, zero-filled, as if written by the calling thread.
  virtual void populate(void* at, std::size_t bytes) = 0;

  virtual void lock(void* at, std::size_t bytes) = 0;
  virtual void unlock(void* at, std::size_t bytes) noexcept = 0;

  // The node of each page, or a negative errno (-ENOENT: no memory there yet).
  virtual void page_nodes(std::span<void* const> pages, std::span<int> nodes) = 0;

  // Migrates single pages without touching the range's policy. Status as in page_nodes.
  virtual void move_pages(std::span<void* const> pages, std::span<const int> targets,
                          std::span<int> status) = 0;

  // Confines the calling thread. Best effort: a container may forbid it, and work goes on
  // elsewhere.
  virtual void run_on(std::span<const int> cpus) noexcept = 0;

  // Lets other threads go first, by 1 to 19. Best effort, and there is no way back.
  virtual void be_nice(int) noexcept {}

  virtual std::size_t page_bytes() const noexcept = 0;
  virtual long process() const noexcept = 0;
};

// The real one. Stateless, so one serves every thread.
Os& linux_os() noexcept;

// From now on the C library maps blocks of so many bytes and more by themselves, and unmaps them
// when they are freed; below that it keeps up to twice as many free at the top of its heap. Nothing
// where it has no such settings.
void map_blocks_from(std::size_t bytes) noexcept;

// 0 where io_uring may be used, else the errno that io_uring_setup gave.
int io_uring_errno() noexcept;

}  // namespace penstock
