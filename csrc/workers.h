// Short-lived threads for setup: first touch, residency counts, the probe. The training step does
// not use them.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "os.h"

namespace penstock {

// The CPUs to use for memory of each node. Key -1 has the CPUs for memory of no particular node.
using NodeCpus = std::map<int, std::vector<int>>;

// Threads that share one list of work. Each index in [0, count) is processed once.
struct Team {
  std::size_t count = 0;
  unsigned threads = 1;   // maximum; also limited by the amount of work and of CPUs
  std::vector<int> cpus;  // CPUs for the threads; any CPU if empty
  std::function<void(std::size_t)> work;
};

// Runs all teams to the end. The first exception stops the others and is rethrown.
void run_teams(Os& os, std::span<const Team> teams);

// Runs one team on any CPUs.
void in_parallel(Os& os, std::size_t count, unsigned threads,
                 const std::function<void(std::size_t)>& work);

}  // namespace penstock
