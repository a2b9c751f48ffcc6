#include "arena.h"

#include <algorithm>
#include <utility>

namespace penstock {

Block::Block(std::shared_ptr<Region> region, std::size_t offset, std::size_t bytes,
             std::shared_ptr<Arena> arena) noexcept
    : region_{std::move(region)}, arena_{std::move(arena)}, offset_{offset}, bytes_{bytes} {}

Block::Block(Block&& other) noexcept
    : region_{other.region_},
      arena_{std::exchange(other.arena_, nullptr)},
      offset_{other.offset_},
      bytes_{other.bytes_} {}

Block::~Block() {
  if (arena_) arena_->let_go();
}

Block Arena::take(std::size_t bytes, std::size_t align) {
  const std::lock_guard hold{state_};
  // Offsets are aligned and the region starts on a 2 MiB boundary, so addresses are aligned too.
  const std::size_t start = (used_ + align - 1) / align * align;
  if (start > capacity() || bytes > capacity() - start) {
    throw ArenaFull{start - used_ + bytes, capacity() - used_};
  }
  padding_ += start - used_;
  used_ = start + bytes;
  peak_ = std::max(peak_, used_);
  ++live_;
  return Block{region_, start, bytes, shared_from_this()};
}

void Arena::reset() {
  const std::lock_guard hold{state_};
  if (live_ > 0) throw ArenaBusy{live_};
  used_ = padding_ = 0;
}

void Arena::let_go() noexcept {
  const std::lock_guard hold{state_};
  --live_;
}

std::size_t Arena::used() const {
  const std::lock_guard hold{state_};
  return used_;
}

std::size_t Arena::padding() const {
  const std::lock_guard hold{state_};
  return padding_;
}

std::size_t Arena::peak() const {
  const std::lock_guard hold{state_};
  return peak_;
}

std::size_t Arena::live() const {
  const std::lock_guard hold{state_};
  return live_;
}

}  // namespace penstock
