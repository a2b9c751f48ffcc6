// System calls on pages of an anonymous file. Contains no policy: each function makes one call,
// checks it, and names it in the error.
#include "paging.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace penstock {
namespace {

[[noreturn]] void fail(const char* call) {
  throw std::system_error{errno, std::generic_category(), call};
}

void* pointer(std::uintptr_t at) { return reinterpret_cast<void*>(at); }

constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

int open_pages(const char* name) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  return fd;
}

void close_pages(int fd) noexcept { ::close(fd); }

void extend_pages(int fd, std::size_t bytes) {
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail("ftruncate");
}

void commit_pages(int fd, std::size_t offset, std::size_t bytes) {
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) fail("fallocate");
  }
}

void punch_pages(int fd, std::size_t offset, std::size_t bytes) {
  constexpr int kPunch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  while (::fallocate(fd, kPunch, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) fail("fallocate(PUNCH_HOLE)");
  }
}

std::uintptr_t reserve_range(std::size_t bytes, std::size_t align) {
  void* taken = ::mmap(nullptr, bytes + align, PROT_NONE, kReserve, -1, 0);
  if (taken == MAP_FAILED) fail("mmap");
  const auto first = reinterpret_cast<std::uintptr_t>(taken);
  const std::uintptr_t at = (first + align - 1) / align * align;
  // Unmap what is left over on both sides of the aligned range: release_range knows only the
  // middle.
  if (at > first) ::munmap(taken, at - first);
  if (first + align > at) ::munmap(pointer(at + bytes), first + align - at);
  return at;
}

void release_range(std::uintptr_t at, std::size_t bytes) noexcept { ::munmap(pointer(at), bytes); }

void map_pages(std::uintptr_t at, std::size_t bytes, int fd, std::size_t offset, bool writable) {
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (::mmap(pointer(at), bytes, access, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    fail("mmap");
  }
}

void unmap_pages(std::uintptr_t at, std::size_t bytes) {
  // Map over the pages instead of unmapping them: another thread's mmap must not be placed inside
  // the range.
  if (::mmap(pointer(at), bytes, PROT_NONE, kReserve | MAP_FIXED, -1, 0) == MAP_FAILED) {
    fail("mmap");
  }
}

}  // namespace penstock
