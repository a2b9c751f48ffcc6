// The threads of the optimizer sweep: few, long-lived, restricted to chosen CPUs, asleep between
// jobs. They are separate from torch's threads, so that a sweep in the background neither uses nor
// waits for those.
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

// Work that is split into blocks. The result must not depend on which thread runs a block, or when.
class Job {
 public:
  explicit Job(std::size_t blocks) noexcept : blocks_{blocks} {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Runs one thread's part: the blocks that `mine` returns, until there are none. Touch shared data
  // only at the end: sixteen threads that add up their results after every block wait for each
  // other more than for memory.
  virtual void work(Blocks& mine) noexcept = 0;

  void wait() const noexcept { done_.wait(false, std::memory_order_acquire); }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // When the first thread started the job and when the last block was finished. Valid once the job
  // is done.
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
  // On a separate cache line: this is all that threads share while they work.
  alignas(64) std::atomic<std::size_t> next_{0};      // the first block that no thread has taken
  alignas(64) std::atomic<std::size_t> finished_{0};  // finishing the last block ends the job
  std::atomic<bool> done_{false};
};

// The blocks that one thread takes from a job, one run at a time.
class Blocks {
 public:
  struct Run {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  Blocks(Job& job, unsigned threads) noexcept : job_{job}, threads_{threads} {}
  // Returns the next blocks, or an empty run if all are taken.
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

  // Threads run on `cpus` (anywhere if empty) with their priority lowered by `nice` (0 to 19).
  // Throws std::invalid_argument, or std::system_error if the system refuses a thread.
  Pool(Os& os, unsigned threads, std::vector<int> cpus, int nice);
  // Finishes all jobs that were started.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Jobs run one after the other, in the order in which they were started: a job may use results of
  // the previous one. A job that is started with `beside` shares no memory with the jobs before it:
  // threads that find no block left start with it, instead of waiting for the slowest thread.
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
  std::deque<Started> queue_;  // jobs that are not finished
  bool closed_ = false;
  std::vector<std::thread> members_;
};

}  // namespace penstock
