#include "workers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace penstock {

void in_parallel(Os& os, std::size_t count, unsigned threads, const std::vector<int>& cpus,
                 const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex failed;  // guards `error`
  std::exception_ptr error;

  const auto drain = [&] {
    if (!cpus.empty()) os.run_on(cpus);
    try {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard hold{failed};
      if (!error) error = std::current_exception();
    }
  };

  // Never the calling thread: its affinity is the caller's business.
  std::vector<std::jthread> team;
  const std::size_t size = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(count, 1));
  team.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    try {
      team.emplace_back(drain);
    } catch (const std::system_error&) {
      if (team.empty()) throw;  // a process limit: fewer threads do the same work
      break;
    }
  }
  team.clear();
  if (error) std::rethrow_exception(error);
}

}  // namespace penstock
