// The threads of the sweep: few, long-lived, confined to chosen CPUs, asleep between jobs. Apart
// from torch's own, so that a sweep in the background neither takes them nor waits for them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "os.h"

namespace penstock {

class Blocks;

// Work cut in blocks. Which thread runs a block, and when, must not matter to the result.
class Job {
 public:
  explicit Job(std::size_t blocks) noexcept : blocks_{blocks} {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // One thread's part: runs what `mine` gives it, until that is empty. What threads share is best
  // left alone until then: sixteen of them that add up their results after every block wait for
  // each other more than for memory.
  virtual void work(Blocks& mine) noexcept = 0;

  void wait() const noexcept { done_.wait(false, std::memory_order_acquire); }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // When the first thread came to it and when the last block was finished. For jobs that are done.
  using Clock = std::chrono::steady_clock;
  Clock::time_point began() const noexcept { return began_; }
  Clock::time_point ended() const noexcept { return ended_; }

 private:
  friend class Blocks;
  friend class Pool;
  Clock::time_point began_ = Clock::now();  // guarded by the pool's lock_ until the job is done
  Clock::time_point ended_ = began_;        // written before done_
  bool begun_ = false;                      // guarded by the pool's lock_
  const std::size_t blocks_;
  // On a line of its own: it is all that threads share while they work.
  alignas(64) std::atomic<std::size_t> next_{0};      // the first block that nobody took
  alignas(64) std::atomic<std::size_t> finished_{0};  // who finishes the last block ends the job
  std::atomic<bool> done_{false};
};

// The blocks that one thread takes from a job, a run at a time.
class Blocks {
 public:
  struct Run {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  Blocks(Job& job, unsigned threads) noexcept : job_{job}, threads_{threads} {}
  // The next ones; none, if all are taken.
  Run next() noexcept;
  std::size_t taken() const noexcept { return taken_; }

 private:
  Job& job_;
  const unsigned threads_;
  std::size_t taken_ = 0;
};

class Pool {
 public:
  static constexpr unsigned kMaxThreads = 512;

  // Threads may run on `cpus` (anywhere if empty) and yield to others by `nice` (0 to 19). Throws
  // std::invalid_argument, or std::system_error where the system refuses a thread.
  Pool(Os& os, unsigned threads, std::vector<int> cpus, int nice);
  // Finishes what was started.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Jobs run one after the other, in the order of their start: one may use what the last one wrote.
  // One that is said to run `beside` those before it shares no memory with them: threads that find
  // no block left begin with it, instead of waiting for the slowest among them.
  void start(std::shared_ptr<Job> job, bool beside = false);

  unsigned threads() const noexcept { return static_cast<unsigned>(members_.size()); }

 private:
  struct Started {
    std::shared_ptr<Job> job;
    bool beside = false;
  };

  void member(unsigned threads) noexcept;
  std::shared_ptr<Job> open_job() const noexcept;
  std::shared_ptr<Job> take();
  void finish(Job& job) noexcept;
  void close() noexcept;

  Os& os_;
  const std::vector<int> cpus_;
  const int nice_;
  std::mutex lock_;  // guards queue_ and closed_
  std::condition_variable changed_;
  std::deque<Started> queue_;  // those that are not finished
  bool closed_ = false;
  std::vector<std::thread> members_;
};

}  // namespace penstock
