// One read or write of an extent: the ticket, the requests it is cut into, and what to do with each
// answer of the kernel. Pure policy: no system calls, no threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace penstock {

enum class Op : std::uint8_t { read, write };

// Failures that have no errno of their own; outside the range of errno.
constexpr int kEndOfFile = -1;    // the file is shorter than the store that was laid in it
constexpr int kBadChecksum = -2;  // what was read is not what was written

// What lies together on one file and in memory.
struct Piece {
  unsigned file;         // which of the engine's files
  std::uint64_t offset;  // in that file
  std::byte* at;         // in memory
  std::size_t bytes;
  std::uint64_t place;  // in the extent: says which checksums are its own
};

// The checksums of one extent, one for each unit of it. A unit's checksum says what should be
// there, from the moment a write of it starts; so a write that failed half-way is found by the next
// read. Two transfers over the same unit at once are the caller's mistake.
class Checksums {
 public:
  Checksums(std::uint64_t bytes, std::size_t unit);
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;

  void note(const std::byte* at, std::size_t bytes, std::uint64_t place) noexcept;
  // The place of the first unit that does not match, or none. Units never written match anything.
  bool matches(const std::byte* at, std::size_t bytes, std::uint64_t place,
               std::uint64_t& wrong) const noexcept;

 private:
  const std::size_t unit_;
  std::vector<std::atomic<std::uint32_t>> units_;  // 0: not written by this process
};

struct Failure {
  int error = 0;  // an errno, or one of the constants above
  unsigned file = 0;
  std::uint64_t offset = 0;  // in the file
  std::uint64_t place = 0;   // in the extent
  std::size_t bytes = 0;     // that were left to move
};

// The ticket. Done once every request has been answered for good: no I/O touches the buffer after.
class Transfer {
 public:
  Transfer(Op op, std::size_t requests, std::shared_ptr<Checksums> checksums)
      : op{op}, checksums{std::move(checksums)}, left_{requests} {}

  const Op op;
  const std::shared_ptr<Checksums> checksums;  // may be null

  bool done() const noexcept { return left_.load(std::memory_order_acquire) == 0; }
  // The first failure, or error 0. Settled only when done.
  Failure failure() const;
  void fail(const Failure& failure);
  // True for the one call that finished the transfer.
  bool finish_one() noexcept { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::atomic<std::size_t> left_;
  mutable std::mutex state_;  // guards failure_
  Failure failure_;
};

// A piece small enough for one system call, and how far it has come.
struct Request {
  std::shared_ptr<Transfer> transfer;
  Piece piece{};
  std::size_t moved = 0;
  unsigned tries = 0;   // media errors so far
  unsigned stalls = 0;  // answers without progress so far

  std::byte* at() const noexcept { return piece.at + moved; }
  std::uint64_t offset() const noexcept { return piece.offset + moved; }
  std::size_t bytes() const noexcept { return piece.bytes - moved; }
};

enum class Next { again, finished, failed };

struct Retries {
  unsigned media = 3;         // further attempts after EIO and its kin
  unsigned stalled = 10'000;  // EINTR, EAGAIN, or a transfer of less than one block
};

// Reads one answer (bytes moved, or a negative errno) into the request. On `failed` the failure is
// noted in the transfer. `align` is what O_DIRECT asks of offsets.
Next settle(Request& request, ssize_t answer, std::size_t align, const Retries& retries);

// Cuts pieces into requests of at most `bytes` each, a multiple of every unit of checksums.
std::vector<Request> cut(const std::shared_ptr<Transfer>& transfer, std::span<const Piece> pieces,
                         std::size_t bytes);
std::size_t count_requests(std::span<const Piece> pieces, std::size_t bytes) noexcept;

}  // namespace penstock
