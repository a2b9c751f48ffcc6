// Short-lived threads for set-up work: first touch, residency counts, the probe. Not for the step.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <vector>

#include "os.h"

namespace penstock {

// The CPUs to use for memory of each node; -1 holds those for memory of no particular node.
using NodeCpus = std::map<int, std::vector<int>>;

// Calls work(i) once for each i in [0, count), from `threads` threads confined to `cpus` (anywhere
// if empty). The first exception stops the rest and is rethrown here.
void in_parallel(Os& os, std::size_t count, unsigned threads, const std::vector<int>& cpus,
                 const std::function<void(std::size_t)>& work);

}  // namespace penstock
