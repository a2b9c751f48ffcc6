// Short-lived threads for set-up work: first touch, residency counts, the probe. Not for the step.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "os.h"

namespace penstock {

// The CPUs to use for memory of each node; -1 holds those for memory of no particular node.
using NodeCpus = std::map<int, std::vector<int>>;

// Threads that share one list of work: each index in [0, count) is worked on once.
struct Team {
  std::size_t count = 0;
  unsigned threads = 1;   // at most; never more than there is work or there are CPUs for
  std::vector<int> cpus;  // where they run; empty: anywhere
  std::function<void(std::size_t)> work;
};

// Runs every team to its end. The first exception stops the rest and is rethrown here.
void run_teams(Os& os, std::span<const Team> teams);

// One team, anywhere.
void in_parallel(Os& os, std::size_t count, unsigned threads,
                 const std::function<void(std::size_t)>& work);

}  // namespace penstock
