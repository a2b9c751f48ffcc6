// System calls on files. Contains no policy: transfer.cpp decides about retries and continuations.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "disk.h"

namespace penstock {
namespace {

class LinuxDisk final : public Disk {
 public:
  ssize_t read(int fd, std::byte* at, std::size_t bytes, std::uint64_t offset) noexcept override {
    const iovec whole{at, bytes};
    const ssize_t moved = ::preadv(fd, &whole, 1, static_cast<off_t>(offset));
    return moved < 0 ? -errno : moved;
  }

  ssize_t write(int fd, const std::byte* at, std::size_t bytes,
                std::uint64_t offset) noexcept override {
    const iovec whole{const_cast<std::byte*>(at), bytes};
    const ssize_t moved = ::pwritev(fd, &whole, 1, static_cast<off_t>(offset));
    return moved < 0 ? -errno : moved;
  }

  int allocate(int fd, std::uint64_t bytes) noexcept override {
    for (;;) {
      if (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0) return 0;
      if (errno == EINTR) continue;
      if (errno != EOPNOTSUPP) return errno;
      // The C library then writes a byte per block, which is slow but happens once and allocates
      // the space too.
      return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    }
  }
};

}  // namespace

Disk& linux_disk() noexcept {
  static LinuxDisk disk;
  return disk;
}

}  // namespace penstock
