// An arena: allocates blocks from one region, front to back, and releases all of them together.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "region.h"

namespace penstock {

struct ArenaFull : std::runtime_error {
  ArenaFull(std::size_t wanted, std::size_t free)
      : std::runtime_error{"arena full"}, wanted{wanted}, free{free} {}
  const std::size_t wanted;  // including padding before the block
  const std::size_t free;
};

struct ArenaBusy : std::runtime_error {
  explicit ArenaBusy(std::size_t live) : std::runtime_error{"arena in use"}, live{live} {}
  const std::size_t live;
};

class Arena;

// A range of bytes that keeps its owner mapped. The contract with Python is pointer, length and
// keep-alive.
class Block {
 public:
  Block(std::shared_ptr<Region> region, std::size_t offset, std::size_t bytes,
        std::shared_ptr<Arena> arena = nullptr) noexcept;
  ~Block();
  Block(Block&& other) noexcept;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  Block& operator=(Block&&) = delete;

  std::byte* data() const noexcept { return region_->data() + offset_; }
  std::size_t offset() const noexcept { return offset_; }
  std::size_t bytes() const noexcept { return bytes_; }
  const std::shared_ptr<Region>& region() const noexcept { return region_; }

 private:
  std::shared_ptr<Region> region_;
  std::shared_ptr<Arena> arena_;  // null for a block that is a whole region, or was moved from
  std::size_t offset_;
  std::size_t bytes_;
};

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(std::shared_ptr<Region> region) : region_{std::move(region)} {}

  Block take(std::size_t bytes, std::size_t align);
  void reset();  // throws ArenaBusy while any block is alive

  const std::shared_ptr<Region>& region() const noexcept { return region_; }
  std::size_t capacity() const noexcept { return region_->bytes(); }
  std::size_t used() const;     // including padding
  std::size_t padding() const;  // bytes of used() lost to alignment
  std::size_t peak() const;     // the largest value of used() so far
  std::size_t live() const;     // number of blocks alive

 private:
  friend class Block;
  void let_go() noexcept;

  const std::shared_ptr<Region> region_;
  mutable std::mutex state_;  // guards the fields below
  std::size_t used_ = 0;
  std::size_t padding_ = 0;
  std::size_t peak_ = 0;
  std::size_t live_ = 0;
};

}  // namespace penstock
