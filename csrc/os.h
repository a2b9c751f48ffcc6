// The operating system's interface for memory and threads. Production code passes linux_os(), tests
// pass a fake that fails on demand. Apart from paging.h, disk.h and ring.h, nothing else in csrc/
// makes system calls.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace penstock {

enum class Huge {
  none,         // base pages, even where the kernel would use huge pages by default
  transparent,  // 2 MiB pages where the kernel has them; falls back page by page
  reserved,     // 2 MiB pages from the administrator's reserved pool; all or nothing
};

enum class Policy {
  local,       // the kernel's default: the node of the first thread that touches a page
  bind,        // only these nodes, nearest first
  interleave,  // page by page over these nodes
};

// An address range with an inaccessible page on each side. An overrun then faults, and the kernel
// cannot merge the range with a neighbour (residency is counted per range).
struct Mapping {
  void* at = nullptr;
  std::size_t bytes = 0;
  void* reserved_at = nullptr;
  std::size_t reserved_bytes = 0;
};

struct Os {
  virtual ~Os() = default;

  // Except for the noexcept functions, all of these throw std::system_error with the name of the
  // failing call.
  // With a file descriptor, the range shows the memory of that file from its start, and shares it
  // with every process that maps it. Without one (-1) the memory is private.
  virtual Mapping map(std::size_t bytes, std::size_t align, Huge huge, int fd) = 0;
  virtual void unmap(const Mapping& mapping) noexcept = 0;

  // Sets the policy for pages that are touched later. With `move`, existing pages are migrated too,
  // and a page that cannot be migrated is an error.
  virtual void bind(void* at, std::size_t bytes, Policy policy, std::span<const int> nodes,
                    bool move) = 0;

  // Allocates memory for every page of the range, zero-filled, as if the calling thread had written
  // to it.
  virtual void populate(void* at, std::size_t bytes) = 0;

  // Replaces the pages of a shared range by huge pages. Best effort: such a range has small pages
  // unless the administrator allows more, whatever it was advised.
  virtual void collapse(void* at, std::size_t bytes) noexcept = 0;

  virtual void lock(void* at, std::size_t bytes) = 0;
  virtual void unlock(void* at, std::size_t bytes) noexcept = 0;

  // Returns the node of each page, or a negative errno (-ENOENT: no memory yet).
  virtual void page_nodes(std::span<void* const> pages, std::span<int> nodes) = 0;

  // Migrates single pages without changing the policy of the range. Status as in page_nodes.
  virtual void move_pages(std::span<void* const> pages, std::span<const int> targets,
                          std::span<int> status) = 0;

  // Restricts the calling thread to these CPUs. Best effort: a container may forbid it, and the
  // thread then runs elsewhere.
  virtual void run_on(std::span<const int> cpus) noexcept = 0;

  // Lowers the priority of the calling thread by 1 to 19. Best effort, and irreversible.
  virtual void be_nice(int) noexcept {}

  virtual std::size_t page_bytes() const noexcept = 0;
  virtual long process() const noexcept = 0;
};

// The real implementation. It has no state, so one instance serves every thread.
Os& linux_os() noexcept;

// Makes the C library allocate blocks of at least `bytes` bytes with mmap, so that freeing them
// returns them to the kernel, and keep at most twice as many bytes free at the top of its heap.
// Does nothing where the C library has no such settings.
void map_blocks_from(std::size_t bytes) noexcept;

// Returns 0 if io_uring can be used, else the errno of io_uring_setup.
int io_uring_errno() noexcept;

}  // namespace penstock
