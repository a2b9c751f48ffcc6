// Where pages are, asked from the kernel page by page, and moving pages that are not ours.
#pragma once

#include <cstddef>
#include <map>

#include "os.h"
#include "placement.h"

namespace penstock {

inline constexpr int kUnmapped = -1;  // the key for pages without memory of their own

// Pages per node over every page that [at, at + bytes) touches.
std::map<int, std::size_t> count_pages(Os& os, void* at, std::size_t bytes, unsigned threads);

// Moves every page that the range touches, leaving the range's policy alone: for memory that
// another allocator owns. Returns how many pages could not be moved.
std::size_t migrate_pages(Os& os, void* at, std::size_t bytes, const Placement& to,
                          unsigned threads);

}  // namespace penstock
