// A range of host memory with a placement. The constructor maps, binds, touches and possibly pins
// it; the destructor undoes this in reverse order. A constructor that throws leaves nothing behind.
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
  locked,      // mlock: not swapped out, but the driver still stages copies to the GPU
  registered,  // registered with CUDA: copies run at the speed of the link
};

struct RegionSpec {
  std::size_t bytes = 0;
  Placement placement;
  Huge huge = Huge::none;
  bool prefault = true;
  unsigned threads = 1;  // threads per node for the first touch
  NodeCpus cpus;
  int fd = -1;  // file whose memory is mapped and shared, for as long as the region is constructed
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  static std::shared_ptr<Region> take(RegionSpec spec, Os& os);
  // Returns the living region that contains this address, or null.
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

  // Migrates [offset, offset + bytes), extended to whole pages. Registered memory cannot migrate,
  // so it is unregistered and registered again: no copy may be in flight.
  void move(std::size_t offset, std::size_t bytes, Placement to);

  // Returns true in the process that created the region: a forked child must not use its parent's
  // driver.
  bool is_ours() const noexcept;

 private:
  void place(std::size_t offset, std::size_t bytes, const Placement& placement, bool move);
  void place_stripe(std::size_t offset, std::size_t bytes, const Placement& placement, bool move);
  void touch(std::size_t offset, std::size_t bytes, const Placement& placement);
  void drop_pin() noexcept;

  Os& os_;
  RegionSpec spec_;
  Mapping mapping_;
  std::atomic<Pin> pin_{Pin::none};  // written under pinning_, read without it
  Registrar* registrar_ = nullptr;   // not null while pin_ is registered
  std::mutex pinning_;               // serializes lock, register_with and move
  const long made_by_;               // id of the process that created the region
};

}  // namespace penstock
