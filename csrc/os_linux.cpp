// System calls for memory and threads. Contains no policy: each function makes one call, checks it,
// and names it in the error.
#include <linux/io_uring.h>
#include <linux/mempolicy.h>
#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "os.h"

namespace penstock {
namespace {

constexpr int kPopulateWrite = 23;    // MADV_POPULATE_WRITE, Linux 5.14; missing in older headers
constexpr int kCollapse = 25;         // MADV_COLLAPSE, Linux 6.1; missing in older headers
constexpr int kHugeShift = 21 << 26;  // MAP_HUGE_2MB; missing in older headers
constexpr std::size_t kHugeBytes = std::size_t{2} << 20;
constexpr int kMaxNodes = 1024;  // CONFIG_NODES_SHIFT is at most 10

[[noreturn]] void fail(const char* call) {
  throw std::system_error{errno, std::generic_category(), call};
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

class NodeMask {
 public:
  explicit NodeMask(std::span<const int> nodes) {
    for (const int node : nodes) {
      if (node < 0 || node >= kMaxNodes) {
        errno = EINVAL;
        fail("mbind");
      }
      words_[node / kBits] |= 1UL << (node % kBits);
    }
  }
  const unsigned long* data() const { return words_.data(); }
  // The kernel reads one bit fewer than the length passed to it.
  static constexpr unsigned long bits() { return kMaxNodes + 1; }

 private:
  static constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMaxNodes / kBits + 1> words_{};
};

int mode_of(Policy policy) {
  switch (policy) {
    case Policy::local:
      return MPOL_DEFAULT;
    case Policy::bind:
      return MPOL_BIND;
    case Policy::interleave:
      return MPOL_INTERLEAVE;
  }
  return MPOL_DEFAULT;
}

void touch_by_hand(void* at, std::size_t bytes, std::size_t page) {
  auto* byte = static_cast<volatile unsigned char*>(at);
  // Writing back the byte that was read preserves the contents: populate may be called on a range
  // in use.
  for (std::size_t i = 0; i < bytes; i += page) byte[i] = byte[i];
}

class LinuxOs final : public Os {
 public:
  Mapping map(std::size_t bytes, std::size_t align, Huge huge, int fd) override {
    const std::size_t page = page_bytes();
    const std::size_t unit = huge == Huge::reserved ? kHugeBytes : page;
    bytes = round_up(bytes, unit);
    const std::size_t reserved_bytes = bytes + align + 2 * page;
    void* reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) fail("mmap");
    const auto start = round_up(reinterpret_cast<std::uintptr_t>(reserved) + page, align);
    // Whether a file has reserved huge pages was decided when it was created.
    int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    if (huge == Huge::reserved && fd < 0) flags |= MAP_HUGETLB | kHugeShift;
    void* at = ::mmap(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    const Mapping mapping{reinterpret_cast<void*>(start), bytes, reserved, reserved_bytes};
    if (at == MAP_FAILED) {
      const int why = errno;
      unmap(mapping);
      errno = why;
      fail("mmap");
    }
    // A kernel without huge pages refuses this advice. Then there are no huge pages.
    if (huge == Huge::transparent) ::madvise(at, bytes, MADV_HUGEPAGE);
    if (huge == Huge::none) ::madvise(at, bytes, MADV_NOHUGEPAGE);
    return mapping;
  }

  void unmap(const Mapping& mapping) noexcept override {
    ::munmap(mapping.reserved_at, mapping.reserved_bytes);
  }

  void bind(void* at, std::size_t bytes, Policy policy, std::span<const int> nodes,
            bool move) override {
    const NodeMask mask{nodes};
    const bool named = policy != Policy::local;
    const unsigned flags = move ? (MPOL_MF_MOVE | MPOL_MF_STRICT) : 0;
    if (::syscall(SYS_mbind, at, bytes, mode_of(policy), named ? mask.data() : nullptr,
                  named ? NodeMask::bits() : 0UL, flags) != 0) {
      fail("mbind");
    }
  }

  void populate(void* at, std::size_t bytes) override {
    for (;;) {
      if (::madvise(at, bytes, kPopulateWrite) == 0) return;
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno != EINVAL) fail("madvise(MADV_POPULATE_WRITE)");
      return touch_by_hand(at, bytes, page_bytes());
    }
  }

  void collapse(void* at, std::size_t bytes) noexcept override { ::madvise(at, bytes, kCollapse); }

  void lock(void* at, std::size_t bytes) override {
    if (::mlock(at, bytes) != 0) fail("mlock");
  }

  void unlock(void* at, std::size_t bytes) noexcept override { ::munlock(at, bytes); }

  void page_nodes(std::span<void* const> pages, std::span<int> nodes) override {
    if (::syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) < 0) {
      fail("move_pages");
    }
  }

  void move_pages(std::span<void* const> pages, std::span<const int> targets,
                  std::span<int> status) override {
    if (::syscall(SYS_move_pages, 0, pages.size(), pages.data(), targets.data(), status.data(),
                  MPOL_MF_MOVE) < 0) {
      fail("move_pages");
    }
  }

  void run_on(std::span<const int> cpus) noexcept override {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
      if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    }
    if (CPU_COUNT(&set) > 0) ::sched_setaffinity(0, sizeof set, &set);
  }

  // On Linux, this affects a single thread and not the process, unlike in POSIX.
  void be_nice(int nice) noexcept override {
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), nice);
  }

  std::size_t page_bytes() const noexcept override {
    static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
  }

  long process() const noexcept override { return ::getpid(); }
};

}  // namespace

Os& linux_os() noexcept {
  static LinuxOs os;
  return os;
}

void map_blocks_from([[maybe_unused]] std::size_t bytes) noexcept {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_THRESHOLD, static_cast<int>(bytes));
  // Setting the first option disables the automatic adjustment of the second, and then every block
  // at the top of the heap would need new pages.
  ::mallopt(M_TRIM_THRESHOLD, static_cast<int>(2 * bytes));
#endif
}

int io_uring_errno() noexcept {
  io_uring_params params{};
  const long fd = ::syscall(SYS_io_uring_setup, 1, &params);
  if (fd < 0) return errno;
  ::close(static_cast<int>(fd));
  return 0;
}

}  // namespace penstock
