#include "workers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <latch>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace penstock {
namespace {

struct Failure {
  std::atomic<bool> seen{false};
  std::mutex storing;  // guards `error`
  std::exception_ptr error;

  void keep(std::exception_ptr caught) {
    seen = true;
    const std::lock_guard hold{storing};
    if (!error) error = std::move(caught);
  }
};

std::size_t size_of(const Team& team) {
  std::size_t size = std::max<std::size_t>(1, std::min<std::size_t>(team.threads, team.count));
  return team.cpus.empty() ? size : std::min(size, team.cpus.size());
}

}  // namespace

void run_teams(Os& os, std::span<const Team> teams) {
  Failure failure;
  const auto next = std::make_unique<std::atomic<std::size_t>[]>(teams.size());

  // Nobody works before everybody is there. Making a thread needs the process's memory map for
  // itself, and threads that fault pages in hold it: started one by one, sixteen of them touched
  // memory at a third of the speed.
  std::latch everybody{1};
  const auto drain = [&](std::size_t t) {
    everybody.wait();
    const Team& team = teams[t];
    if (!team.cpus.empty()) os.run_on(team.cpus);
    try {
      for (std::size_t i; !failure.seen && (i = next[t].fetch_add(1)) < team.count;) team.work(i);
    } catch (...) {
      failure.keep(std::current_exception());
    }
  };

  {
    // Never the calling thread: its affinity is the caller's business.
    std::vector<std::jthread> threads;
    std::size_t total = 0;
    for (const Team& team : teams) total += size_of(team);
    threads.reserve(total);  // now: a throw later would leave threads waiting for everybody
    for (std::size_t t = 0; t < teams.size(); ++t) {
      for (std::size_t i = 0; i < size_of(teams[t]); ++i) {
        try {
          threads.emplace_back(drain, t);
        } catch (const std::system_error&) {
          // A limit on threads: fewer do the same work, but every team needs one.
          if (i == 0) failure.keep(std::current_exception());
          break;
        }
      }
    }
    everybody.count_down();
  }
  if (failure.error) std::rethrow_exception(failure.error);
}

void in_parallel(Os& os, std::size_t count, unsigned threads,
                 const std::function<void(std::size_t)>& work) {
  const Team team{count, threads, {}, work};
  run_teams(os, std::span{&team, 1});
}

}  // namespace penstock
