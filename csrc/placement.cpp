#include "placement.h"

#include <algorithm>

namespace penstock {

std::vector<Run> runs_of(const Placement& placement, std::size_t offset, std::size_t bytes) {
  if (placement.pattern.empty()) {
    const bool one_node = placement.policy == Policy::bind && placement.nodes.size() == 1;
    return {{offset, bytes, one_node ? placement.nodes.front() : -1}};
  }
  std::vector<Run> runs;
  const std::size_t end = offset + bytes;
  while (offset < end) {
    const std::size_t unit = offset / kUnitBytes;
    const std::size_t stop = std::min(end, (unit + 1) * kUnitBytes);
    const int node = placement.pattern[unit % placement.pattern.size()];
    if (!runs.empty() && runs.back().node == node) {
      runs.back().bytes += stop - offset;
    } else {
      runs.push_back({offset, stop - offset, node});
    }
    offset = stop;
  }
  return runs;
}

std::vector<Run> cut(const std::vector<Run>& runs, std::size_t piece) {
  std::vector<Run> pieces;
  for (const Run& run : runs) {
    for (std::size_t done = 0; done < run.bytes; done += piece) {
      pieces.push_back({run.offset + done, std::min(piece, run.bytes - done), run.node});
    }
  }
  return pieces;
}

}  // namespace penstock
