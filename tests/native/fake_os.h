// Simulated machines. FakeOs returns real heap memory, so that a sanitizer detects stray writes. It
// records a node for every page as the kernel would, counts what is mapped, and fails the n-th call
// of a kind.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "cuda_driver.h"
#include "os.h"

namespace penstock {

struct Bound {
  std::size_t offset;
  std::size_t bytes;
  Policy policy;
  std::vector<int> nodes;
  bool move;
};

class FakeOs final : public Os {
 public:
  // Fails the `nth` call (from 1) of `call` with `error`.
  void fail(const std::string& call, int nth, int error) { plans_[call] = {nth, error}; }

  // Simulates memory of another allocator, with every page of the range on `node`.
  void give(std::uintptr_t at, std::size_t bytes, int node) {
    for (std::uintptr_t page = at; page < at + bytes; page += page_bytes()) pages[page] = node;
  }

  std::size_t mapped = 0;
  std::size_t locked = 0;
  int mapped_fd = -1;         // of the last call of map
  std::size_t collapsed = 0;  // bytes
  std::vector<Bound> bound;
  std::map<std::size_t, int> touched_under;  // page offset -> node it was bound to when touched
  std::map<std::size_t, std::vector<int>>
      touched_from;                     // page offset -> CPUs of the touching thread
  std::map<std::uintptr_t, int> pages;  // page address -> node it is on
  std::set<std::uintptr_t> stuck;       // pages that the kernel does not move
  // Simulates transparent huge pages: 2 MiB move as a whole, and only the first page reports it.
  bool moves_whole_units = false;
  std::vector<std::vector<int>> ran_on;  // the CPUs that each thread was restricted to
  std::function<void()> when_confined;   // called by each such thread
  long process_id = 100;

  Mapping map(std::size_t bytes, std::size_t align, Huge huge, int fd) override {
    maybe_fail("map");
    mapped_fd = fd;
    const std::size_t unit = huge == Huge::reserved ? kUnit : page_bytes();
    bytes = (bytes + unit - 1) / unit * unit;
    void* at = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (at == nullptr) throw std::system_error{ENOMEM, std::generic_category(), "mmap"};
    mapped += bytes;
    base_ = static_cast<std::byte*>(at);
    return {at, bytes, at, bytes};
  }
  void unmap(const Mapping& mapping) noexcept override {
    mapped -= mapping.bytes;
    const auto at = reinterpret_cast<std::uintptr_t>(mapping.at);
    pages.erase(pages.lower_bound(at), pages.lower_bound(at + mapping.bytes));
    std::free(mapping.at);
  }
  void collapse(void*, std::size_t bytes) noexcept override {
    const std::lock_guard hold{state_};
    collapsed += bytes;
  }
  void bind(void* at, std::size_t bytes, Policy policy, std::span<const int> nodes,
            bool move) override {
    maybe_fail("bind");
    const std::lock_guard hold{state_};
    bound.push_back({offset_of(at), bytes, policy, {nodes.begin(), nodes.end()}, move});
    if (!move) return;
    const auto first = reinterpret_cast<std::uintptr_t>(at);
    for (auto page = pages.lower_bound(first); page != pages.lower_bound(first + bytes); ++page) {
      // For the kernel, a page on any node of the list is in place.
      const bool in_place = std::find(nodes.begin(), nodes.end(), page->second) != nodes.end();
      if (!in_place) page->second = nodes.front();
    }
  }
  void populate(void* at, std::size_t bytes) override {
    maybe_fail("populate");
    const std::lock_guard hold{state_};
    const std::size_t offset = offset_of(at);
    for (std::size_t page = offset; page < offset + bytes; page += page_bytes()) {
      touched_under.try_emplace(page, node_for(page));
      touched_from.try_emplace(page, confined_to);
      pages.try_emplace(reinterpret_cast<std::uintptr_t>(base_) + page, node_for(page));
    }
  }
  void lock(void*, std::size_t bytes) override {
    maybe_fail("lock");
    locked += bytes;
  }
  void unlock(void*, std::size_t bytes) noexcept override { locked -= bytes; }
  void page_nodes(std::span<void* const> list, std::span<int> nodes) override {
    maybe_fail("page_nodes");
    const std::lock_guard hold{state_};
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto page = pages.find(reinterpret_cast<std::uintptr_t>(list[i]));
      nodes[i] = page == pages.end() ? -ENOENT : page->second;
    }
  }
  void move_pages(std::span<void* const> list, std::span<const int> targets,
                  std::span<int> status) override {
    maybe_fail("move_pages");
    const std::lock_guard hold{state_};
    std::uintptr_t moving = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto at = reinterpret_cast<std::uintptr_t>(list[i]);
      const auto page = pages.find(at);
      if (page == pages.end() || stuck.contains(at)) {
        status[i] = page == pages.end() ? -ENOENT : -EBUSY;
        continue;
      }
      status[i] = moves_whole_units && at / kUnit == moving ? -EBUSY : targets[i];
      moving = at / kUnit;
      const auto last =
          moves_whole_units ? pages.lower_bound((moving + 1) * kUnit) : std::next(page);
      const auto first = moves_whole_units ? pages.lower_bound(moving * kUnit) : page;
      for (auto each = first; each != last; ++each) each->second = targets[i];
    }
  }
  void run_on(std::span<const int> cpus) noexcept override {
    confined_to.assign(cpus.begin(), cpus.end());
    if (when_confined) when_confined();
    const std::lock_guard hold{state_};
    ran_on.push_back(confined_to);
  }
  std::size_t page_bytes() const noexcept override { return 4096; }
  long process() const noexcept override { return process_id; }

 private:
  static constexpr std::size_t kUnit = std::size_t{2} << 20;
  struct Plan {
    int nth;
    int error;
  };

  std::size_t offset_of(void* at) const {
    return static_cast<std::size_t>(static_cast<std::byte*>(at) - base_);
  }
  void maybe_fail(const std::string& call) {
    const std::lock_guard hold{state_};
    const auto plan = plans_.find(call);
    if (plan == plans_.end() || --plan->second.nth != 0) return;
    throw std::system_error{plan->second.error, std::generic_category(), call};
  }
  // Returns the single node of the last binding of this page, or -1.
  int node_for(std::size_t page) const {
    for (auto b = bound.rbegin(); b != bound.rend(); ++b) {
      if (page < b->offset || page >= b->offset + b->bytes) continue;
      return b->policy == Policy::bind && b->nodes.size() == 1 ? b->nodes.front() : -1;
    }
    return -1;
  }

  static inline thread_local std::vector<int> confined_to;  // CPUs of this thread; any CPU if empty
  std::mutex state_;  // guards everything that two touching threads share
  std::map<std::string, Plan> plans_;
  std::byte* base_ = nullptr;
};

class FakeRegistrar final : public Registrar {
 public:
  int fail_nth = 0;  // number of the add() that fails; 0: none
  int registered = 0;
  int adds = 0;
  int removes = 0;

  void add(void*, std::size_t) override {
    if (++adds == fail_nth) throw CudaError{2, "CUDA_ERROR_OUT_OF_MEMORY"};
    ++registered;
  }
  void remove(void*) noexcept override {
    ++removes;
    --registered;
  }
};

}  // namespace penstock
