#include "region.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <system_error>
#include <utility>

#include "residency.h"

namespace penstock {
namespace {

constexpr std::size_t kPiece = std::size_t{4} << 20;  // bytes that a thread touches at a time

// [Note: stripes and the kernel's map count]
// A bound stripe is one kernel mapping per run of units, and a process may have about 65,530
// mappings, which is 128 GiB of 2 MiB units. Therefore a stripe is bound and touched window by
// window, and each window then gets a single policy for all nodes of the stripe, without moving
// pages, so that the kernel merges it with its neighbour. The kernel merges only mappings that
// share one reverse-map root, which is why one page is touched before the first split.
constexpr std::size_t kWindow = 1024 * kUnitBytes;

// All living regions by their first address, to find the region of a tensor by its address.
struct Living {
  std::mutex using_it;  // guards `regions`
  std::map<const std::byte*, Region*> regions;
};

Living& living() {
  static Living* all = new Living;  // never destroyed: the last tensor may outlive static objects
  return *all;
}

}  // namespace

std::shared_ptr<Region> Region::take(RegionSpec spec, Os& os) {
  return std::make_shared<Region>(std::move(spec), os);
}

std::shared_ptr<Region> Region::at(const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  Living& all = living();
  const std::lock_guard hold{all.using_it};
  auto next = all.regions.upper_bound(byte);
  if (next == all.regions.begin()) return nullptr;
  Region* region = std::prev(next)->second;
  if (byte >= region->data() + region->mapped_bytes()) return nullptr;
  return region->weak_from_this().lock();  // null once its destruction has started
}

Region::Region(RegionSpec spec, Os& os) : os_{os}, spec_{std::move(spec)}, made_by_{os.process()} {
  mapping_ = os_.map(spec_.bytes, kUnitBytes, spec_.huge, spec_.fd);
  try {
    place(0, mapping_.bytes, spec_.placement, /*move=*/false);
  } catch (...) {
    os_.unmap(mapping_);
    throw;
  }
  const std::lock_guard hold{living().using_it};
  living().regions[data()] = this;
}

Region::~Region() {
  {
    const std::lock_guard hold{living().using_it};
    living().regions.erase(data());
  }
  drop_pin();
  os_.unmap(mapping_);
}

bool Region::is_ours() const noexcept { return made_by_ == os_.process(); }

void Region::place(std::size_t offset, std::size_t bytes, const Placement& placement, bool move) {
  if (!placement.pattern.empty()) return place_stripe(offset, bytes, placement, move);
  std::byte* at = data() + offset;
  // For the kernel, a page on any node of an interleave is in place already, so these pages are
  // distributed explicitly.
  const bool deal = move && placement.policy == Policy::interleave;
  if (move || placement.policy != Policy::local) {
    os_.bind(at, bytes, placement.policy, placement.nodes, move && !deal);
  }
  if (deal) {
    const std::size_t grain = spec_.huge == Huge::none ? os_.page_bytes() : kUnitBytes;
    if (migrate_pages(os_, at, bytes, placement, grain, spec_.threads) > 0) {
      throw std::system_error{EIO, std::generic_category(), "move_pages"};
    }
  }
  if (spec_.prefault && !move) touch(offset, bytes, placement);
}

void Region::place_stripe(std::size_t offset, std::size_t bytes, const Placement& placement,
                          bool move) {
  std::byte* at = data() + offset;
  if (spec_.prefault && !move) {
    // See [Note: stripes and the kernel's map count].
    const int first = runs_of(placement, offset, 1).front().node;
    os_.bind(at, bytes, Policy::bind, std::span{&first, 1}, /*move=*/false);
    os_.populate(at, os_.page_bytes());
  }
  for (std::size_t done = 0; done < bytes; done += kWindow) {
    const std::size_t window = std::min(kWindow, bytes - done);
    for (const Run& run : runs_of(placement, offset + done, window)) {
      os_.bind(data() + run.offset, run.bytes, Policy::bind, std::span{&run.node, 1}, move);
    }
    if (!spec_.prefault) continue;  // untouched pages need the policy of their unit
    if (!move) touch(offset + done, window, placement);
    os_.bind(at + done, window, Policy::bind, placement.nodes, /*move=*/false);
  }
}

void Region::touch(std::size_t offset, std::size_t bytes, const Placement& placement) {
  std::map<int, std::vector<Run>> by_node;
  for (const Run& piece : cut(runs_of(placement, offset, bytes), kPiece)) {
    by_node[piece.node].push_back(piece);
  }
  // The threads of all nodes run concurrently, so that a stripe is touched at the sum of its nodes'
  // rates.
  std::vector<Team> teams;
  for (const auto& [node, pieces] : by_node) {
    const auto cpus = spec_.cpus.find(node);
    teams.push_back({pieces.size(), spec_.threads,
                     cpus == spec_.cpus.end() ? std::vector<int>{} : cpus->second,
                     [this, &list = pieces](std::size_t i) {
                       std::byte* at = data() + list[i].offset;
                       os_.populate(at, list[i].bytes);
                       if (spec_.fd >= 0 && spec_.huge == Huge::transparent) {
                         os_.collapse(at, list[i].bytes);
                       }
                     }});
  }
  run_teams(os_, teams);
}

void Region::lock() {
  const std::lock_guard hold{pinning_};
  if (pin_ != Pin::none) return;
  os_.lock(mapping_.at, mapping_.bytes);
  pin_ = Pin::locked;
}

void Region::register_with(Registrar& registrar) {
  const std::lock_guard hold{pinning_};
  if (pin_ == Pin::registered) return;
  registrar.add(mapping_.at, mapping_.bytes);
  registrar_ = &registrar;
  pin_ = Pin::registered;
}

void Region::drop_pin() noexcept {
  if (pin_ == Pin::registered && is_ours()) registrar_->remove(mapping_.at);
  if (pin_ == Pin::locked) os_.unlock(mapping_.at, mapping_.bytes);
  pin_ = Pin::none;
}

void Region::move(std::size_t offset, std::size_t bytes, Placement to) {
  const std::lock_guard hold{pinning_};
  const std::size_t page = spec_.huge == Huge::reserved ? kUnitBytes : os_.page_bytes();
  const std::size_t end = std::min((offset + bytes + page - 1) / page * page, mapping_.bytes);
  offset = offset / page * page;
  Registrar* registrar = registrar_;
  const bool was_registered = pin_ == Pin::registered;
  if (was_registered) drop_pin();
  // Register the memory again whether or not the pages moved: a failed move must not unpin it.
  const auto restore = [&] {
    if (!was_registered || !is_ours()) return;
    registrar->add(mapping_.at, mapping_.bytes);
    pin_ = Pin::registered;
  };
  try {
    place(offset, end - offset, to, /*move=*/true);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

}  // namespace penstock
