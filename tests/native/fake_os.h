// Machines that lie. FakeOs serves real heap memory, so a stray write is the sanitizer's business,
// counts what is out, and fails the n-th call of a kind.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
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

  std::size_t mapped = 0;
  std::size_t locked = 0;
  std::vector<Bound> bound;
  std::map<std::size_t, int> touched_under;  // page offset -> node it was bound to when touched
  long process_id = 100;

  Mapping map(std::size_t bytes, std::size_t align, Huge huge) override {
    maybe_fail("map");
    const std::size_t unit = huge == Huge::reserved ? std::size_t{2} << 20 : page_bytes();
    bytes = (bytes + unit - 1) / unit * unit;
    void* at = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (at == nullptr) throw std::system_error{ENOMEM, std::generic_category(), "mmap"};
    mapped += bytes;
    base_ = static_cast<std::byte*>(at);
    return {at, bytes, at, bytes};
  }
  void unmap(const Mapping& mapping) noexcept override {
    mapped -= mapping.bytes;
    std::free(mapping.at);
  }
  void bind(void* at, std::size_t bytes, Policy policy, std::span<const int> nodes,
            bool move) override {
    maybe_fail("bind");
    const std::lock_guard hold{state_};
    const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(at) - base_);
    bound.push_back({offset, bytes, policy, {nodes.begin(), nodes.end()}, move});
  }
  void populate(void* at, std::size_t bytes) override {
    maybe_fail("populate");
    const std::lock_guard hold{state_};
    const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(at) - base_);
    for (std::size_t page = offset; page < offset + bytes; page += page_bytes()) {
      touched_under.try_emplace(page, node_for(page));
    }
  }
  void lock(void*, std::size_t bytes) override {
    maybe_fail("lock");
    locked += bytes;
  }
  void unlock(void*, std::size_t bytes) noexcept override { locked -= bytes; }
  void page_nodes(std::span<void* const> pages, std::span<int> nodes) override {
    maybe_fail("page_nodes");
    for (std::size_t i = 0; i < pages.size(); ++i) nodes[i] = i % 7 == 6 ? -ENOENT : 0;
  }
  void move_pages(std::span<void* const>, std::span<const int> targets,
                  std::span<int> status) override {
    maybe_fail("move_pages");
    std::copy(targets.begin(), targets.end(), status.begin());
  }
  void run_on(std::span<const int>) noexcept override {}
  std::size_t page_bytes() const noexcept override { return 4096; }
  long process() const noexcept override { return process_id; }

 private:
  struct Plan {
    int nth;
    int error;
  };

  void maybe_fail(const std::string& call) {
    const std::lock_guard hold{state_};
    const auto plan = plans_.find(call);
    if (plan == plans_.end() || --plan->second.nth != 0) return;
    throw std::system_error{plan->second.error, std::generic_category(), call};
  }
  // The single node that the last binding of this page names, or -1.
  int node_for(std::size_t page) const {
    for (auto b = bound.rbegin(); b != bound.rend(); ++b) {
      if (page < b->offset || page >= b->offset + b->bytes) continue;
      return b->policy == Policy::bind && b->nodes.size() == 1 ? b->nodes.front() : -1;
    }
    return -1;
  }

  std::mutex state_;  // guards everything that two touching threads may reach
  std::map<std::string, Plan> plans_;
  std::byte* base_ = nullptr;
};

class FakeRegistrar final : public Registrar {
 public:
  int fail_nth = 0;  // the n-th add fails; 0: none
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
