// Which node each part of a range belongs to. Contains no system calls and touches no memory.
#pragma once

#include <cstddef>
#include <vector>

#include "os.h"

namespace penstock {

inline constexpr std::size_t kUnitBytes = std::size_t{2} << 20;  // unit of a stripe: one huge page

struct Placement {
  Policy policy = Policy::local;
  std::vector<int> nodes;
  // Only for stripes: unit k of the range belongs to node pattern[k % size], and `nodes` lists each
  // node once. Empty for every other policy.
  std::vector<int> pattern;
};

// A part of a range and the node of its memory (-1: the policy decides page by page).
struct Run {
  std::size_t offset;
  std::size_t bytes;
  int node;
};

// Splits [offset, offset + bytes) where the node changes. Units count from the start of the range,
// so the result does not depend on where a caller starts.
std::vector<Run> runs_of(const Placement& placement, std::size_t offset, std::size_t bytes);

// Splits runs into pieces of at most `piece` bytes, so that many threads can share one run.
std::vector<Run> cut(const std::vector<Run>& runs, std::size_t piece);

}  // namespace penstock
