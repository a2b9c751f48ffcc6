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

// Moves every page that the range touches, leaving the range's policy alone. Pages are dealt by
// `grain`, a multiple of the page size, counted from address 0: a huge page moves as a whole, so a
// grain below 2 MiB is for ranges without them. Returns how many pages are not where they should be
// afterwards; pages without memory do not count.
std::size_t migrate_pages(Os& os, void* at, std::size_t bytes, const Placement& to,
                          std::size_t grain, unsigned threads);

}  // namespace penstock
