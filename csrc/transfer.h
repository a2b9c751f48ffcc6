// One read or write of an extent: the ticket, the requests that it is split into, and the reaction
// to each answer of the kernel. Contains only policy, no system calls and no threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace penstock {

enum class Op : std::uint8_t { read, write };

// Failures without an errno, outside the range of errno values.
constexpr int kEndOfFile = -1;     // the file is shorter than the store in it
constexpr int kBadChecksum = -2;   // the bytes read are not those written
constexpr int kNeverWritten = -3;  // the bytes read were never written, so they mean nothing

// A range that is contiguous in one file and in memory.
struct Piece {
  unsigned file;         // index of the engine's file
  std::uint64_t offset;  // offset in that file
  std::byte* at;         // address in memory
  std::size_t bytes;
  std::uint64_t place;  // offset in the extent, which determines its checksums
};

// The checksums of one extent, one per unit. A checksum is set when a write of its unit starts, so
// that the next read detects a write that failed halfway. Two concurrent transfers of the same unit
// are an error of the caller.
class Checksums {
 public:
  Checksums(std::uint64_t bytes, std::size_t unit);
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;

  void note(const std::byte* at, std::size_t bytes, std::uint64_t place) noexcept;
  // Notes that all units are zeros, as in a file that was allocated and never written.
  void note_zeros();
  // Returns 0, or kBadChecksum or kNeverWritten and the offset of the first unit that is wrong.
  int check(const std::byte* at, std::size_t bytes, std::uint64_t place,
            std::uint64_t& wrong) const noexcept;

 private:
  const std::uint64_t bytes_;
  const std::size_t unit_;
  std::vector<std::atomic<std::uint32_t>> units_;  // 0: never written
};

struct Failure {
  int error = 0;  // an errno, or one of the constants above
  unsigned file = 0;
  std::uint64_t offset = 0;  // offset in the file
  std::uint64_t place = 0;   // offset in the extent
  std::size_t bytes = 0;     // bytes that were left to move
};

// The ticket. It is done once every request has its final answer; no I/O touches the buffer after
// that.
class Transfer {
 public:
  Transfer(Op op, std::size_t requests, std::shared_ptr<Checksums> checksums)
      : op{op}, checksums{std::move(checksums)}, left_{requests} {}

  const Op op;
  const std::shared_ptr<Checksums> checksums;  // may be null

  bool done() const noexcept { return left_.load(std::memory_order_acquire) == 0; }
  // Returns the first failure, or error 0. Final only when the transfer is done.
  Failure failure() const;
  void fail(const Failure& failure);
  // Returns true for the call that finishes the transfer. One call at a time.
  bool finish_one() noexcept {
    ended_ = Clock::now();
    return left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
  }
  // When the last request got its final answer. Valid once the transfer is done.
  using Clock = std::chrono::steady_clock;
  Clock::time_point ended() const noexcept { return ended_; }

 private:
  Clock::time_point ended_{};  // written before left_
  std::atomic<std::size_t> left_;
  mutable std::mutex state_;  // guards failure_
  Failure failure_;
};

// A piece that is small enough for one system call, and its progress.
struct Request {
  std::shared_ptr<Transfer> transfer;
  Piece piece{};
  std::size_t moved = 0;
  unsigned tries = 0;   // number of media errors so far
  unsigned stalls = 0;  // number of answers without progress so far

  std::byte* at() const noexcept { return piece.at + moved; }
  std::uint64_t offset() const noexcept { return piece.offset + moved; }
  std::size_t bytes() const noexcept { return piece.bytes - moved; }
};

enum class Next { again, finished, failed };

struct Retries {
  unsigned media = 3;         // retries after EIO and similar errors
  unsigned stalled = 10'000;  // retries after EINTR, EAGAIN, or less than one block
  std::chrono::milliseconds first_pause{120};  // before the first retry after EIO; then 4 times it
};

// Processes one answer (bytes moved, or a negative errno). On `failed`, the failure is recorded in
// the transfer. `align` is the alignment that O_DIRECT requires of offsets.
Next settle(Request& request, ssize_t answer, std::size_t align, const Retries& retries);

// Splits pieces into requests of at most `bytes` each, a multiple of the checksum unit.
std::vector<Request> cut(const std::shared_ptr<Transfer>& transfer, std::span<const Piece> pieces,
                         std::size_t bytes);
std::size_t count_requests(std::span<const Piece> pieces, std::size_t bytes) noexcept;

}  // namespace penstock
