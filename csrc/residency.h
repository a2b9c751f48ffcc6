// Where pages are, according to the kernel, and migration of pages that do not belong to a region.
#pragma once

#include <cstddef>
#include <map>

#include "os.h"
#include "placement.h"

namespace penstock {

inline constexpr int kUnmapped = -1;  // key of pages without memory

// Counts the pages per node over every page that [at, at + bytes) touches.
std::map<int, std::size_t> count_pages(Os& os, void* at, std::size_t bytes, unsigned threads);

// Migrates every page that the range touches, without changing the range's policy. Pages are
// distributed in units of `grain`, a multiple of the page size, counted from address 0. A huge page
// moves as a whole, so a grain below 2 MiB is only for ranges without huge pages. Returns the
// number of pages that are not on their target afterwards; pages without memory do not count.
std::size_t migrate_pages(Os& os, void* at, std::size_t bytes, const Placement& to,
                          std::size_t grain, unsigned threads);

}  // namespace penstock
