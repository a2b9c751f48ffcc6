// Storage engines: start a transfer, get a ticket, wait for it. Two of them behind one interface;
// what they share (the queue, the tickets, closing) is here, what differs is how a request reaches
// the kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
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
  std::vector<int> files;  // descriptors, owned by the caller, open until close() says none hangs
  std::size_t align = 4096;
  std::size_t request_bytes = std::size_t{1} << 20;
  unsigned depth = 16;   // requests with the kernel at once, over all workers
  unsigned workers = 1;  // threads that serve the ring; the threads engine has one per request
  Retries retries;
};

struct Counters {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t requests = 0;
  std::uint64_t again = 0;  // continuations and retries: 0 on a healthy disk
};

// A request that the kernel has had for too long.
struct Hanging {
  Op op;
  unsigned file;
  std::uint64_t offset;
  std::size_t bytes;
};

// Requests waiting for a worker, and those that are with the kernel. Outlives the engine if a
// device hangs: the stuck thread keeps it.
class Queue {
 public:
  struct Slot {  // what one request occupies from when a worker takes it to when it is done
    Request request;
    bool busy = false;
    std::atomic<bool> with_kernel{false};  // set by the worker around the kernel's part
  };

  Queue(EngineOptions options, std::size_t slots);

  const EngineOptions options;

  // Callers.
  std::shared_ptr<Transfer> start(Op op, std::span<const Piece> pieces,
                                  std::shared_ptr<Checksums> checksums);
  // False if the time ran out first. With `all` false, one of them is enough.
  bool wait(std::span<const std::shared_ptr<Transfer>> transfers, bool all, double seconds);
  // Fails what no worker has taken yet and waits for the rest. Returns what still hangs.
  std::vector<Hanging> close(double seconds);
  Counters counters() const;
  std::size_t taken() const;  // by workers, and not done

  // Workers. A slot belongs to one of them, which alone touches its request.
  Slot& slot(std::size_t index) { return slots_[index]; }
  bool take(Slot& slot);      // waits; false when closing
  bool try_take(Slot& slot);  // false when there is nothing to do now
  bool closing() const;
  // Takes the kernel's answer. True if the request must be issued again.
  bool answer(Slot& slot, ssize_t answer);
  // Ends a request that a worker has taken but will not issue.
  void drop(Slot& slot, int error);
  // The kernel takes no more requests: fails this one and, from now on, every other.
  void broken(Slot& slot, int error);

 private:
  void take_front(Slot& slot);  // state_ held
  void release(Slot& slot, bool failed);
  void drop_waiting(int error);  // state_ held

  mutable std::mutex state_;         // guards all below
  std::condition_variable work_;     // something waits, or closing
  std::condition_variable settled_;  // a transfer is done, or no worker has anything
  std::deque<Request> waiting_;
  std::vector<Slot> slots_;
  std::size_t taken_ = 0;
  bool closing_ = false;
  int broken_ = 0;
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
  // Lets the kernel keep this memory mapped for I/O. 0 or an errno: work goes on without.
  virtual int register_memory(std::byte* at, std::size_t bytes);
  // May be called again, to ask whether what hung still does. Nothing is left of an engine that
  // closed well: no thread, no descriptor.
  std::vector<Hanging> close(double seconds);

  Queue& queue() noexcept { return *queue_; }

 protected:
  // Runs `serve` on a thread of its own until it returns.
  void launch(std::function<void(Queue&)> serve);
  virtual void wake() {}
  virtual void let_go() {}  // nothing runs any more

  static constexpr double kLastChance = 5.0;  // seconds a destructor waits for a disk

  const std::shared_ptr<Queue> queue_;

 private:
  const long owner_ = linux_os().process();
  std::vector<std::thread> team_;
};

// One thread per request that may be with the kernel.
std::unique_ptr<Engine> make_thread_engine(EngineOptions options, Disk& disk);

// One or a few threads, each with a ring of its own. Throws std::system_error where the kernel
// gives no ring.
std::unique_ptr<Engine> make_ring_engine(EngineOptions options, const RingMaker& make_ring);

}  // namespace penstock
