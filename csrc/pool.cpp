#include "pool.h"

#include <algorithm>
#include <cfenv>
#include <stdexcept>
#include <string>

namespace penstock {

// Returns long runs while many blocks are left, because each start costs an access to a shared
// cache line and a cold prefetcher, and single blocks at the end, so that all threads finish
// together.
Blocks::Run Blocks::next() noexcept {
  constexpr std::size_t kLongest = 16;
  std::size_t begin = job_.next_.load(std::memory_order_relaxed);
  std::size_t length = 0;
  do {
    const std::size_t left = job_.blocks_ - begin;
    if (left == 0) return {};
    length = std::clamp<std::size_t>(left / (4 * threads_), 1, kLongest);
  } while (!job_.next_.compare_exchange_weak(begin, begin + length, std::memory_order_relaxed));
  taken_ += length;
  return {begin, begin + length};
}

Pool::Pool(Os& os, unsigned threads, std::vector<int> cpus, int nice)
    : os_{os}, cpus_{std::move(cpus)}, nice_{nice} {
  if (threads == 0 || threads > kMaxThreads) {
    throw std::invalid_argument{"threads must be 1 to " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(threads)};
  }
  if (nice < 0 || nice > 19) {
    throw std::invalid_argument{"nice must be 0 to 19, got " + std::to_string(nice)};
  }
  members_.reserve(threads);
  try {
    for (unsigned i = 0; i < threads; ++i) members_.emplace_back([=, this] { member(threads); });
  } catch (...) {
    close();
    throw;
  }
}

Pool::~Pool() { close(); }

void Pool::close() noexcept {
  {
    const std::lock_guard hold{lock_};
    closed_ = true;
  }
  changed_.notify_all();
  for (std::thread& member : members_) member.join();
}

void Pool::start(std::shared_ptr<Job> job, bool beside) {
  if (job->blocks_ == 0) {
    job->done_.store(true, std::memory_order_release);
    return;
  }
  {
    const std::lock_guard hold{lock_};
    queue_.push_back({std::move(job), beside});
  }
  changed_.notify_all();
}

// Returns the oldest job with a block that no thread has taken. Finished jobs are removed from the
// queue, so a job that is not at its front has jobs before it that some thread still works on.
std::shared_ptr<Job> Pool::open_job() const noexcept {
  for (const Started& each : queue_) {
    if (!each.beside && &each != &queue_.front()) break;
    if (each.job->next_.load(std::memory_order_relaxed) < each.job->blocks_) return each.job;
  }
  return nullptr;
}

// Returns the next job to work on, and sleeps until there is one. Returns null when the pool is
// closed and all jobs are done.
std::shared_ptr<Job> Pool::take() {
  std::unique_lock hold{lock_};
  std::shared_ptr<Job> job;
  changed_.wait(hold, [&] { return (job = open_job()) || (closed_ && queue_.empty()); });
  if (job && !job->begun_) {
    job->begun_ = true;
    job->began_ = Job::Clock::now();
  }
  return job;
}

void Pool::finish(Job& job) noexcept {
  job.ended_ = Job::Clock::now();
  job.done_.store(true, std::memory_order_release);
  job.done_.notify_all();
  {
    const std::lock_guard hold{lock_};
    const auto is_this = [&](const Started& each) { return each.job.get() == &job; };
    queue_.erase(std::find_if(queue_.begin(), queue_.end(), is_this));
  }
  changed_.notify_all();
}

void Pool::member(unsigned threads) noexcept {
  // A thread inherits the floating-point mode of its creator, and torch.set_flush_denormal would
  // change results.
  std::fesetenv(FE_DFL_ENV);
  if (!cpus_.empty()) os_.run_on(cpus_);
  if (nice_ > 0) os_.be_nice(nice_);
  while (const std::shared_ptr<Job> job = take()) {
    Blocks mine{*job, threads};
    job->work(mine);
    const std::size_t before = job->finished_.fetch_add(mine.taken(), std::memory_order_acq_rel);
    if (mine.taken() > 0 && before + mine.taken() == job->blocks_) finish(*job);
  }
}

}  // namespace penstock
