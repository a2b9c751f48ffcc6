// io_uring through raw system calls: three calls and three mappings, which is less work than a
// dependency on liburing (docs/decisions/0020).
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "ring.h"

namespace penstock {
namespace {

constexpr std::uint64_t kWake = ~std::uint64_t{0};  // tag of the read that wake() completes

[[noreturn]] void fail(const char* call) {
  throw std::system_error{errno, std::generic_category(), call};
}

class Descriptor {
 public:
  Descriptor(long fd, const char* call) : fd_{static_cast<int>(fd)} {
    if (fd < 0) fail(call);
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const noexcept { return fd_; }

 private:
  const int fd_;
};

class Shared {  // memory shared with the kernel
 public:
  Shared(int ring, std::size_t bytes, off_t what) : bytes_{bytes} {
    at_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    if (at_ == MAP_FAILED) fail("mmap of io_uring");
  }
  ~Shared() { ::munmap(at_, bytes_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  template <class T>
  T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(at_) + offset);
  }

 private:
  void* at_;
  const std::size_t bytes_;
};

unsigned load(unsigned* shared) {
  return std::atomic_ref<unsigned>{*shared}.load(std::memory_order_acquire);
}
void store(unsigned* shared, unsigned value) {
  std::atomic_ref<unsigned>{*shared}.store(value, std::memory_order_release);
}

io_uring_params ask(unsigned depth) {
  io_uring_params params{};
  params.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
  params.cq_entries = 4 * depth;
  return params;
}

class LinuxRing final : public Ring {
 public:
  LinuxRing(unsigned depth, std::span<const int> files)
      : params_{ask(depth + 1)},
        ring_{::syscall(SYS_io_uring_setup, depth + 1, &params_), "io_uring_setup"},
        sq_{ring_, params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
            IORING_OFF_SQ_RING},
        cq_{ring_, params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe),
            IORING_OFF_CQ_RING},
        sqes_{ring_, params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES},
        wake_{::eventfd(0, EFD_CLOEXEC), "eventfd"} {
    if (call_register(IORING_REGISTER_FILES, files.data(), static_cast<unsigned>(files.size()))) {
      fail("io_uring_register(files)");
    }
    io_uring_rsrc_register empty{};
    empty.nr = kMaxBuffers;
    empty.flags = IORING_RSRC_REGISTER_SPARSE;
    no_buffers_ = call_register(IORING_REGISTER_BUFFERS2, &empty, sizeof empty) ? errno : 0;
    push_wake();
  }

  // The kernel destroys a ring asynchronously. Files that are still registered would stay open
  // until then, and a raw device would stay claimed.
  ~LinuxRing() override { call_register(IORING_UNREGISTER_FILES, nullptr, 0); }

  void push(const Submission& submission) noexcept override {
    io_uring_sqe sqe{};
    const bool reads = submission.op == Op::read;
    if (submission.buffer >= 0) {
      sqe.opcode = reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      sqe.buf_index = static_cast<__u16>(submission.buffer);
    } else {
      sqe.opcode = reads ? IORING_OP_READ : IORING_OP_WRITE;
    }
    sqe.flags = IOSQE_FIXED_FILE;
    sqe.fd = static_cast<int>(submission.file);
    sqe.off = submission.offset;
    sqe.addr = reinterpret_cast<std::uintptr_t>(submission.at);
    sqe.len = static_cast<unsigned>(submission.bytes);
    sqe.user_data = submission.tag;
    put(sqe);
  }

  int enter(bool wait) noexcept override {
    // Entries that the kernel has not consumed, including those of an earlier call that it refused.
    const unsigned pending = tail_ - load(sq_.at<unsigned>(params_.sq_off.head));
    if (pending == 0 && !wait) return 0;
    const long done = ::syscall(SYS_io_uring_enter, static_cast<int>(ring_), pending, wait ? 1 : 0,
                                wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    return done < 0 ? -errno : 0;
  }

  bool pop(Completion& completion) noexcept override {
    auto* head = cq_.at<unsigned>(params_.cq_off.head);
    for (;;) {
      const unsigned at = *head;
      if (at == load(cq_.at<unsigned>(params_.cq_off.tail))) return false;
      const unsigned mask = *cq_.at<unsigned>(params_.cq_off.ring_mask);
      const io_uring_cqe cqe = cq_.at<io_uring_cqe>(params_.cq_off.cqes)[at & mask];
      store(head, at + 1);
      if (cqe.user_data == kWake) {
        push_wake();
        continue;
      }
      completion = {cqe.user_data, cqe.res};
      return true;
    }
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    // Fails only if 2^64 wakes are pending.
    [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
  }

  int register_buffer(unsigned index, std::byte* at, std::size_t bytes) noexcept override {
    if (no_buffers_ != 0) return no_buffers_;
    const iovec whole{at, bytes};
    io_uring_rsrc_update2 update{};
    update.offset = index;
    update.nr = 1;
    update.data = reinterpret_cast<std::uintptr_t>(&whole);
    return call_register(IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0 ? errno : 0;
  }

 private:
  long call_register(unsigned what, const void* argument, unsigned count) const noexcept {
    return ::syscall(SYS_io_uring_register, static_cast<int>(ring_), what, argument, count);
  }

  void push_wake() noexcept {
    io_uring_sqe sqe{};
    sqe.opcode = IORING_OP_READ;
    sqe.fd = wake_;
    sqe.addr = reinterpret_cast<std::uintptr_t>(&wakes_);
    sqe.len = sizeof wakes_;
    sqe.user_data = kWake;
    put(sqe);
  }

  void put(const io_uring_sqe& sqe) noexcept {
    const unsigned index = tail_ & *sq_.at<unsigned>(params_.sq_off.ring_mask);
    sqes_.at<io_uring_sqe>(0)[index] = sqe;
    sq_.at<unsigned>(params_.sq_off.array)[index] = index;
    store(sq_.at<unsigned>(params_.sq_off.tail), ++tail_);
  }

  io_uring_params params_;
  Descriptor ring_;
  Shared sq_;
  Shared cq_;
  Shared sqes_;
  Descriptor wake_;
  unsigned tail_ = 0;
  std::uint64_t wakes_ = 0;  // written by the kernel
  int no_buffers_ = 0;       // the errno if memory cannot be registered
};

}  // namespace

std::shared_ptr<Ring> linux_ring(unsigned depth, std::span<const int> files) {
  return std::make_shared<LinuxRing>(depth, files);
}

}  // namespace penstock
