// Which node each part of a range belongs to. Pure: no system calls, no memory.
#pragma once

#include <cstddef>
#include <vector>

#include "os.h"

namespace penstock {

inline constexpr std::size_t kUnitBytes = std::size_t{2} << 20;  // a stripe's unit: one huge page

struct Placement {
  Policy policy = Policy::local;
  std::vector<int> nodes;
  // Stripes only: unit k of the range belongs to pattern[k % size]; `nodes` then holds each node
  // once. Empty for every other policy.
  std::vector<int> pattern;
};

// A piece of a range and the node its memory comes from (-1: the policy decides page by page).
struct Run {
  std::size_t offset;
  std::size_t bytes;
  int node;
};

// [offset, offset + bytes) cut where the node changes. Units count from the start of the range, so
// the cuts do not depend on where a caller begins.
std::vector<Run> runs_of(const Placement& placement, std::size_t offset, std::size_t bytes);

// Runs cut further into pieces of at most `piece` bytes, so that many threads can share one run.
std::vector<Run> cut(const std::vector<Run>& runs, std::size_t piece);

}  // namespace penstock
