// A range of host memory with a placement: mapped, bound, given its pages, perhaps pinned; undone
// in reverse by the destructor. A constructor that throws leaves nothing behind.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_driver.h"
#include "os.h"
#include "placement.h"
#include "workers.h"

namespace penstock {

enum class Pin {
  none,
  locked,      // mlock: cannot be swapped out; the GPU's copies are still staged by the driver
  registered,  // known to CUDA: copies run at the speed of the link
};

struct RegionSpec {
  std::size_t bytes = 0;
  Placement placement;
  Huge huge = Huge::none;
  bool prefault = true;
  unsigned threads = 1;  // for the first touch, per node
  NodeCpus cpus;
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  static std::shared_ptr<Region> take(RegionSpec spec, Os& os);
  // The living region that holds this address, if one of ours does.
  static std::shared_ptr<Region> at(const void* address);

  Region(RegionSpec spec, Os& os);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const noexcept { return static_cast<std::byte*>(mapping_.at); }
  std::size_t bytes() const noexcept { return spec_.bytes; }
  std::size_t mapped_bytes() const noexcept { return mapping_.bytes; }
  Pin pinned() const noexcept { return pin_; }

  void lock();
  void register_with(Registrar& registrar);

  // Migrates [offset, offset + bytes), widened to whole pages. Registered memory cannot migrate, so
  // it is let go and registered anew: no copy may be in flight.
  void move(std::size_t offset, std::size_t bytes, Placement to);

  // True in the process that made the region: a forked child must not talk to its parent's driver.
  bool is_ours() const noexcept;

 private:
  void place(std::size_t offset, std::size_t bytes, const Placement& placement, bool move);
  void place_stripe(std::size_t offset, std::size_t bytes, const Placement& placement, bool move);
  void touch(std::size_t offset, std::size_t bytes, const Placement& placement);
  void drop_pin() noexcept;

  Os& os_;
  RegionSpec spec_;
  Mapping mapping_;
  std::atomic<Pin> pin_{Pin::none};  // changed under pinning_, read by anyone
  Registrar* registrar_ = nullptr;   // set while pin_ is registered
  std::mutex pinning_;               // one of lock, register_with and move at a time
  const long made_by_;               // process id
};

}  // namespace penstock
