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

struct Release {
  std::latch& latch;
  ~Release() { latch.count_down(); }
};

std::size_t size_of(const Team& team) {
  std::size_t size = std::max<std::size_t>(1, std::min<std::size_t>(team.threads, team.count));
  return team.cpus.empty() ? size : std::min(size, team.cpus.size());
}

}  // namespace

void run_teams(Os& os, std::span<const Team> teams) {
  Failure failure;
  const auto next = std::make_unique<std::atomic<std::size_t>[]>(teams.size());
  const auto drain = [&](std::size_t t) {
    const Team& team = teams[t];
    try {
      for (std::size_t i; !failure.seen && (i = next[t].fetch_add(1)) < team.count;) team.work(i);
    } catch (...) {
      failure.keep(std::current_exception());
    }
  };

  // No thread works before all exist. Creating a thread needs exclusive access to the process's
  // memory map, which threads that fault pages in hold: started one by one, sixteen threads touched
  // memory at a third of the speed.
  std::latch everybody{1};
  const auto member = [&](std::size_t t) {
    everybody.wait();
    if (!teams[t].cpus.empty()) os.run_on(teams[t].cpus);
    drain(t);
  };

  std::vector<std::size_t> alone;  // teams without a thread
  {
    std::vector<std::jthread> threads;
    const Release when_all_are_made{everybody};  // runs before `threads` joins, also on a throw
    for (std::size_t t = 0; t < teams.size(); ++t) {
      for (std::size_t i = 0; i < size_of(teams[t]); ++i) {
        try {
          threads.emplace_back(member, t);
        } catch (const std::system_error&) {  // a limit on threads: fewer can do the work
          if (i == 0) alone.push_back(t);
          break;
        }
      }
    }
  }
  for (const std::size_t t : alone) drain(t);  // on this thread, with the caller's affinity
  if (failure.error) std::rethrow_exception(failure.error);
}

void in_parallel(Os& os, std::size_t count, unsigned threads,
                 const std::function<void(std::size_t)>& work) {
  const Team team{count, threads, {}, work};
  run_teams(os, std::span{&team, 1});
}

}  // namespace penstock
