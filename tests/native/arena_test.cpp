#include "arena.h"

#include <atomic>
#include <set>
#include <thread>

#include "check.h"
#include "fake_os.h"

using namespace penstock;

namespace {

std::shared_ptr<Arena> arena_of(std::size_t bytes, FakeOs& os) {
  return std::make_shared<Arena>(
      Region::take({bytes, {Policy::local, {}, {}}, Huge::none, true, 1, {}}, os));
}

}  // namespace

TEST_CASE("an arena holds exactly its capacity") {
  FakeOs os;
  const auto arena = arena_of(3 * 4096 + 5, os);
  const Block first = arena->take(3 * 4096, 256);
  const Block second = arena->take(5, 1);
  CHECK(arena->used() == arena->capacity());
  CHECK_THROWS_AS(arena->take(1, 1), ArenaFull);
}

TEST_CASE("a full arena reports wanted and free bytes, including padding") {
  FakeOs os;
  const auto arena = arena_of(1000, os);
  const Block first = arena->take(1, 1);
  try {
    arena->take(1000, 256);
    CHECK(false);
  } catch (const ArenaFull& full) {
    CHECK(full.wanted == 1255 && full.free == 999);
  }
  CHECK(arena->used() == 1 && arena->live() == 1);
}

TEST_CASE("a size near the top of the address space does not wrap") {
  FakeOs os;
  const auto arena = arena_of(4096, os);
  CHECK_THROWS_AS(arena->take(~std::size_t{0}, 1), ArenaFull);
  CHECK_THROWS_AS(arena->take(~std::size_t{0} - 255, 256), ArenaFull);
}

TEST_CASE("an arena in use cannot be reset") {
  FakeOs os;
  const auto arena = arena_of(4096, os);
  {
    const Block block = arena->take(16, 16);
    CHECK_THROWS_AS(arena->reset(), ArenaBusy);
  }
  arena->reset();
  CHECK(arena->used() == 0 && arena->peak() == 16);
}

TEST_CASE("the peak survives a reset and a smaller second round") {
  FakeOs os;
  const auto arena = arena_of(4096, os);
  {
    const Block block = arena->take(1000, 1);
  }
  arena->reset();
  const Block block = arena->take(10, 1);
  CHECK(arena->used() == 10 && arena->peak() == 1000);
}

TEST_CASE("padding is counted, and cleared by a reset") {
  FakeOs os;
  const auto arena = arena_of(4096, os);
  {
    const Block first = arena->take(1, 1);
    const Block second = arena->take(16, 256);
    const Block third = arena->take(16, 64);
    CHECK(arena->padding() == 255 + 48 && arena->used() == 256 + 64 + 16);
  }
  arena->reset();
  CHECK(arena->padding() == 0 && arena->used() == 0);
}

TEST_CASE("a block outlives its arena and frees it last") {
  FakeOs os;
  auto arena = arena_of(4096, os);
  {
    const Block block = arena->take(16, 16);
    arena.reset();
    block.data()[15] = std::byte{1};
    CHECK(os.mapped == 4096);
  }
  CHECK(os.mapped == 0);
}

TEST_CASE("a moved-from block is not released twice") {
  FakeOs os;
  const auto arena = arena_of(4096, os);
  {
    Block first = arena->take(16, 16);
    const Block second{std::move(first)};
    CHECK(arena->live() == 1);
  }
  CHECK(arena->live() == 0);
}

TEST_CASE("threads never get overlapping blocks") {
  FakeOs os;
  const auto arena = arena_of(std::size_t{1} << 20, os);
  std::mutex adding;
  std::set<std::size_t> offsets;
  {
    std::vector<std::jthread> team;
    for (int t = 0; t < 4; ++t) {
      team.emplace_back([&] {
        for (int i = 0; i < 256; ++i) {
          const Block block = arena->take(1000, 64);
          block.data()[0] = block.data()[999] = std::byte{7};
          const std::lock_guard hold{adding};
          offsets.insert(block.offset());
        }
      });
    }
  }
  CHECK(offsets.size() == 1024);
  std::size_t end = 0;
  for (const std::size_t offset : offsets) {
    CHECK(offset >= end && offset % 64 == 0);
    end = offset + 1000;
  }
  CHECK(arena->live() == 0);
}
