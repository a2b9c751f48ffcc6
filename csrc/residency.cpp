#include "residency.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "workers.h"

namespace penstock {
namespace {

constexpr std::size_t kBatch = 4096;  // pages per system call: 16 MiB of memory, 48 KiB of lists

struct Pages {
  std::byte* first;
  std::size_t count;
  std::size_t page;

  Pages(void* at, std::size_t bytes, std::size_t page) : page{page} {
    const auto start = reinterpret_cast<std::uintptr_t>(at);
    const auto floor = start / page * page;
    first = reinterpret_cast<std::byte*>(floor);
    count = bytes == 0 ? 0 : (start + bytes - floor + page - 1) / page;
  }
  std::size_t batches() const { return (count + kBatch - 1) / kBatch; }
  std::vector<void*> batch(std::size_t i) const {
    std::vector<void*> list(std::min(kBatch, count - i * kBatch));
    for (std::size_t k = 0; k < list.size(); ++k) list[k] = first + (i * kBatch + k) * page;
    return list;
  }
};

// Moves pages until every page is on its target, at most three times. The kernel's status of single
// pages is unreliable for huge pages: it moves them by their first page and reports only that one
// as moved.
std::size_t settle(Os& os, const std::vector<void*>& list, const std::vector<int>& targets) {
  std::vector<int> status(list.size());
  std::size_t wrong = 0;
  for (int attempt = 0; attempt < 3; ++attempt) {
    os.move_pages(list, targets, status);
    os.page_nodes(list, status);
    wrong = 0;
    for (std::size_t k = 0; k < list.size(); ++k)
      wrong += status[k] >= 0 && status[k] != targets[k];
    if (wrong == 0) break;
  }
  return wrong;
}

}  // namespace

std::map<int, std::size_t> count_pages(Os& os, void* at, std::size_t bytes, unsigned threads) {
  const Pages pages{at, bytes, os.page_bytes()};
  std::map<int, std::size_t> total;
  std::mutex adding;  // guards `total`
  in_parallel(os, pages.batches(), threads, [&](std::size_t i) {
    const std::vector<void*> list = pages.batch(i);
    std::vector<int> nodes(list.size());
    os.page_nodes(list, nodes);
    std::map<int, std::size_t> counted;
    for (const int node : nodes) ++counted[node < 0 ? kUnmapped : node];
    const std::lock_guard hold{adding};
    for (const auto& [node, count] : counted) total[node] += count;
  });
  return total;
}

std::size_t migrate_pages(Os& os, void* at, std::size_t bytes, const Placement& to,
                          std::size_t grain, unsigned threads) {
  const Pages pages{at, bytes, os.page_bytes()};
  const std::vector<int>& order = to.pattern.empty() ? to.nodes : to.pattern;
  std::atomic<std::size_t> stuck{0};
  in_parallel(os, pages.batches(), threads, [&](std::size_t i) {
    const std::vector<void*> list = pages.batch(i);
    std::vector<int> targets(list.size());
    for (std::size_t k = 0; k < list.size(); ++k) {
      targets[k] = order[reinterpret_cast<std::uintptr_t>(list[k]) / grain % order.size()];
    }
    stuck += settle(os, list, targets);
  });
  return stuck;
}

}  // namespace penstock
