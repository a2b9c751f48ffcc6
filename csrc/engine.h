// Storage engines: start a transfer, get a ticket, wait for it. There are two engines behind one
// interface. The common parts (the queue, the tickets, closing) are here; the engines differ in how
// a request reaches the kernel.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "disk.h"
#include "os.h"
#include "ring.h"
#include "transfer.h"

namespace penstock {

struct EngineClosed : std::runtime_error {
  EngineClosed() : std::runtime_error{"the engine is closed"} {}
};

struct EngineOptions {
  std::vector<int>
      files;  // descriptors, owned by the caller, open until close() returns that nothing hangs
  std::size_t align = 4096;
  std::size_t request_bytes = std::size_t{1} << 20;
  unsigned depth = 16;   // maximum number of requests in the kernel, over all workers
  unsigned workers = 1;  // ring threads; the threads engine has one per request instead
  Retries retries;
};

struct Counters {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t requests = 0;
  std::uint64_t again = 0;  // number of continuations and retries; 0 on a healthy disk
};

// A request that has been in the kernel for too long.
struct Hanging {
  Op op;
  unsigned file;
  std::uint64_t offset;
  std::size_t bytes;
};

// Requests that wait for a worker, and requests in the kernel. Requests of one direction are taken
// in order. While both directions wait, workers take about as many of one as of the other: a drive
// is faster in both directions together than in either, and one transfer alone can fill all slots.
// If a device hangs, the queue outlives the engine: the stuck thread keeps it alive.
class Queue {
 public:
  struct Slot {  // holds one request from when a worker takes it until it is done
    Request request;
    bool busy = false;
    std::atomic<bool> with_kernel{false};  // set by the worker while the kernel has the request
  };

  Queue(EngineOptions options, std::size_t slots);

  const EngineOptions options;

  // For callers.
  std::shared_ptr<Transfer> start(Op op, std::span<const Piece> pieces,
                                  std::shared_ptr<Checksums> checksums);
  // Returns false on a timeout. With `all` false, one finished transfer is enough.
  bool wait(std::span<const std::shared_ptr<Transfer>> transfers, bool all, double seconds);
  // Fails the requests that no worker has taken yet and waits for the others. Returns those that
  // still hang.
  std::vector<Hanging> close(double seconds);
  Counters counters() const;
  std::size_t taken() const;  // requests taken by workers and not done

  // For workers. A slot belongs to one worker, and only that worker touches its request.
  Slot& slot(std::size_t index) { return slots_[index]; }
  bool take(Slot& slot);      // waits for a request; false when closing
  bool try_take(Slot& slot);  // false if there is no request
  bool closing() const;
  // Processes the kernel's answer. Returns true if the request must be issued again.
  bool answer(Slot& slot, ssize_t answer);
  // Fails a request that a worker has taken but will not issue.
  void drop(Slot& slot, int error);
  // The kernel accepts no more requests: fails this one and, from now on, every other one.
  void broken(Slot& slot, int error);

 private:
  // The requests of one direction: those that wait for a worker, and how many workers have.
  struct Direction {
    std::deque<Request> waiting;
    std::size_t taken = 0;
  };

  static constexpr std::size_t kLead = 2;  // requests by which one direction may be ahead

  Direction& direction(Op op) { return op == Op::read ? reads_ : writes_; }
  bool anything_waits() const { return !reads_.waiting.empty() || !writes_.waiting.empty(); }
  Op next_op() const;           // state_ held; something waits
  void take_front(Slot& slot);  // state_ held
  void release(Slot& slot, bool failed);
  void wait_out_error(unsigned tries);  // pauses before a request that failed is issued again
  void drop_waiting(int error);         // state_ held

  mutable std::mutex state_;         // guards the fields below
  std::condition_variable work_;     // a request waits, or the queue is closing
  std::condition_variable settled_;  // a transfer is done, or no worker has a request
  Direction reads_;
  Direction writes_;
  Op last_taken_ = Op::write;
  std::vector<Slot> slots_;
  bool closing_ = false;
  int broken_ = 0;
  // Time of the first media error since a request last succeeded.
  std::optional<std::chrono::steady_clock::time_point> failing_since_;
  std::condition_variable stop_pause_;  // the queue is closing
  Counters counters_;
};

class Engine {
 public:
  Engine(EngineOptions options, std::size_t slots)
      : queue_{std::make_shared<Queue>(std::move(options), slots)} {}
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::shared_ptr<Transfer> start(Op op, std::span<const Piece> pieces,
                                          std::shared_ptr<Checksums> checksums) {
    return queue_->start(op, pieces, std::move(checksums));
  }
  // Registers memory for I/O with the kernel. Returns 0 or an errno; transfers work without
  // registration too.
  virtual int register_memory(std::byte* at, std::size_t bytes);
  // May be called again, to check whether requests still hang. An engine that closed without
  // hanging requests leaves no thread and no descriptor behind.
  std::vector<Hanging> close(double seconds);

  Queue& queue() noexcept { return *queue_; }

 protected:
  // Runs `serve` on a new thread until it returns.
  void launch(std::function<void(Queue&)> serve);
  virtual void wake() {}
  virtual void let_go() {}  // called when no worker runs any more

  static constexpr double kLastChance = 5.0;  // seconds that the destructor waits for a disk

  const std::shared_ptr<Queue> queue_;

 private:
  const long owner_ = linux_os().process();
  std::vector<std::thread> team_;
};

// The engine with one thread per request in flight.
std::unique_ptr<Engine> make_thread_engine(EngineOptions options, Disk& disk);

// The engine with one or a few threads, each with its own ring. Throws std::system_error if the
// kernel provides no ring.
std::unique_ptr<Engine> make_ring_engine(EngineOptions options, const RingMaker& make_ring);

}  // namespace penstock
