#include "region.h"

#include <algorithm>

#include "check.h"
#include "fake_os.h"

using namespace penstock;

namespace {

constexpr std::size_t kUnit = kUnitBytes;

RegionSpec on_node(int node, std::size_t bytes) {
  return {bytes, {Policy::bind, {node}, {}}, Huge::none, true, 2, {}};
}

RegionSpec striped(std::vector<int> pattern, std::vector<int> nodes, std::size_t bytes) {
  return {bytes, {Policy::bind, std::move(nodes), std::move(pattern)}, Huge::none, true, 2, {}};
}

// Checks that a region whose constructor fails leaves nothing mapped.
void leaves_nothing(const char* call, int nth, const RegionSpec& spec) {
  FakeOs os;
  os.fail(call, nth, ENOMEM);
  CHECK_THROWS_AS((Region{spec, os}), std::system_error);
  CHECK(os.mapped == 0);
}

// Page offset -> node.
std::map<std::size_t, int> nodes_of(const Region& region, const FakeOs& os) {
  const auto base = reinterpret_cast<std::uintptr_t>(region.data());
  std::map<std::size_t, int> nodes;
  for (const auto& [page, node] : os.pages) {
    if (page >= base && page < base + region.mapped_bytes()) nodes[page - base] = node;
  }
  return nodes;
}

}  // namespace

TEST_CASE("a region that cannot be mapped leaves nothing behind") {
  leaves_nothing("map", 1, on_node(2, 4096));
}

TEST_CASE("a region that cannot be bound leaves nothing behind") {
  leaves_nothing("bind", 1, on_node(2, 4096));
}

TEST_CASE("a region that cannot be touched leaves nothing behind") {
  leaves_nothing("populate", 1, on_node(2, 4096));
}

TEST_CASE("a stripe that fails halfway leaves nothing behind") {
  for (int nth = 1; nth <= 5; ++nth) {
    leaves_nothing("bind", nth, striped({1, 2}, {1, 2}, 4 * kUnit));
    leaves_nothing("populate", nth, striped({1, 2}, {1, 2}, 4 * kUnit));
  }
}

TEST_CASE("a failure of the second region leaves the first one intact") {
  FakeOs os;
  os.fail("map", 2, ENOMEM);
  {
    const Region first{on_node(0, 8192), os};
    CHECK_THROWS_AS((Region{on_node(1, 8192), os}), std::system_error);
    CHECK(os.mapped == 8192);
  }
  CHECK(os.mapped == 0);
}

TEST_CASE("every page of a stripe is touched under its own node") {
  FakeOs os;
  const std::size_t bytes = 7 * kUnit + 12345;
  const Region region{striped({1, 1, 2}, {1, 2}, bytes), os};
  const std::vector<int> pattern{1, 1, 2};
  CHECK(os.touched_under.size() == (bytes + 4095) / 4096);
  for (const auto& [page, node] : os.touched_under) {
    CHECK(node == pattern[page / kUnit % 3]);
  }
}

TEST_CASE("each node's pages are touched from its own CPUs") {
  FakeOs os;
  RegionSpec spec = striped({1, 2}, {1, 2}, 8 * kUnit);
  spec.threads = 2;
  spec.cpus = {{1, {4, 5, 6}}, {2, {7}}, {-1, {8}}};
  const Region region{spec, os};
  os.touched_from.erase(0);  // see [Note: stripes and the kernel's map count]
  for (const auto& [page, cpus] : os.touched_from) CHECK(cpus == spec.cpus[1 + page / kUnit % 2]);
  CHECK(std::count(os.ran_on.begin(), os.ran_on.end(), spec.cpus[1]) == 2);
  CHECK(std::count(os.ran_on.begin(), os.ran_on.end(), spec.cpus[2]) == 1);
}

TEST_CASE("memory of no particular node is touched from the CPUs for such memory") {
  FakeOs os;
  RegionSpec spec = on_node(0, 8 * kUnit);
  spec.placement = {Policy::interleave, {0, 1}, {}};
  spec.cpus = {{0, {4}}, {1, {5}}, {-1, {6, 7}}};
  const Region region{spec, os};
  for (const auto& [page, cpus] : os.touched_from) CHECK(cpus == std::vector<int>({6, 7}));
}

TEST_CASE("a touched stripe ends with one policy over all its nodes") {
  FakeOs os;
  const Region region{striped({1, 2}, {1, 2}, 4 * kUnit), os};
  const Bound& last = os.bound.back();
  CHECK(last.offset == 0 && last.bytes == 4 * kUnit);
  CHECK(last.nodes == std::vector<int>({1, 2}) && !last.move);
}

TEST_CASE("an untouched stripe keeps a policy per unit and allocates no page") {
  FakeOs os;
  RegionSpec spec = striped({1, 2}, {1, 2}, 4 * kUnit);
  spec.prefault = false;
  const Region region{spec, os};
  CHECK(os.touched_under.empty());
  CHECK(os.bound.size() == 4);
  for (const Bound& bound : os.bound) CHECK(bound.nodes.size() == 1);
}

TEST_CASE("a failed registration leaves the region usable and unpinned") {
  FakeOs os;
  FakeRegistrar cuda;
  cuda.fail_nth = 1;
  {
    Region region{on_node(0, 4096), os};
    CHECK_THROWS_AS(region.register_with(cuda), CudaError);
    CHECK(region.pinned() == Pin::none);
  }
  CHECK(os.mapped == 0 && cuda.removes == 0);
}

TEST_CASE("a registered region is unregistered once, before it is unmapped") {
  FakeOs os;
  FakeRegistrar cuda;
  {
    Region region{on_node(0, 4096), os};
    region.register_with(cuda);
    region.register_with(cuda);
    CHECK(cuda.adds == 1 && region.pinned() == Pin::registered);
  }
  CHECK(cuda.registered == 0 && cuda.removes == 1 && os.mapped == 0);
}

TEST_CASE("a forked child does not call its parent's driver") {
  FakeOs os;
  FakeRegistrar cuda;
  {
    Region region{on_node(0, 4096), os};
    region.register_with(cuda);
    os.process_id = 101;
  }
  CHECK(cuda.removes == 0 && os.mapped == 0);
}

TEST_CASE("a failed lock leaves the region unlocked") {
  FakeOs os;
  os.fail("lock", 1, ENOMEM);
  {
    Region region{on_node(0, 4096), os};
    CHECK_THROWS_AS(region.lock(), std::system_error);
    CHECK(region.pinned() == Pin::none);
    region.lock();
    CHECK(os.locked == 4096);
  }
  CHECK(os.locked == 0 && os.mapped == 0);
}

TEST_CASE("moving registered memory unregisters it and registers it again") {
  FakeOs os;
  FakeRegistrar cuda;
  Region region{on_node(0, 3 * 4096), os};
  region.register_with(cuda);
  region.move(5000, 100, {Policy::bind, {1}, {}});
  CHECK(cuda.adds == 2 && cuda.registered == 1 && region.pinned() == Pin::registered);
  const Bound& moved = os.bound.back();
  CHECK(moved.offset == 4096 && moved.bytes == 4096 && moved.move);
}

TEST_CASE("a failed move keeps the pin") {
  FakeOs os;
  FakeRegistrar cuda;
  Region region{on_node(0, 4096), os};
  region.register_with(cuda);
  os.fail("bind", 1, EIO);
  CHECK_THROWS_AS(region.move(0, 4096, {Policy::bind, {1}, {}}), std::system_error);
  CHECK(cuda.registered == 1 && region.pinned() == Pin::registered);
}

TEST_CASE("memory that cannot be registered again is not reported as pinned") {
  FakeOs os;
  FakeRegistrar cuda;
  cuda.fail_nth = 2;
  {
    Region region{on_node(0, 4096), os};
    region.register_with(cuda);
    CHECK_THROWS_AS(region.move(0, 4096, {Policy::bind, {1}, {}}), CudaError);
    CHECK(region.pinned() == Pin::none);
  }
  CHECK(cuda.removes == 1 && cuda.registered == 0);
}

TEST_CASE("an untouched region moved to a stripe keeps one policy per unit") {
  FakeOs os;
  RegionSpec spec = on_node(1, 4 * kUnit);
  spec.prefault = false;
  Region region{spec, os};
  region.move(0, 4 * kUnit, {Policy::bind, {1, 2}, {1, 2}});
  os.populate(region.data(), 4 * kUnit);
  CHECK(os.touched_under.size() == 4 * kUnit / 4096);
  for (const auto& [page, node] : os.touched_under) CHECK(node == (page / kUnit % 2 ? 2 : 1));
}

TEST_CASE("a touched region moved to a stripe is distributed by unit under one policy") {
  FakeOs os;
  Region region{on_node(0, 5 * kUnit), os};
  region.move(kUnit, 4 * kUnit, {Policy::bind, {1, 2}, {1, 2}});
  for (const auto& [page, node] : nodes_of(region, os)) {
    CHECK(node == (page < kUnit ? 0 : page / kUnit % 2 ? 2 : 1));
  }
  CHECK(os.bound.back().offset == kUnit && os.bound.back().bytes == 4 * kUnit);
  CHECK(os.bound.back().nodes == std::vector<int>({1, 2}) && !os.bound.back().move);
}

TEST_CASE("moving to an interleave also distributes pages of its own nodes") {
  FakeOs os;
  Region region{on_node(1, 3 * kUnit), os};
  region.move(0, 3 * kUnit, {Policy::interleave, {1, 2}, {}});
  std::map<int, std::size_t> counts;
  int before = 0;
  for (const auto& [page, node] : nodes_of(region, os)) {
    CHECK(node != before);
    before = node;
    ++counts[node];
  }
  CHECK(counts == std::map<int, std::size_t>{{1, 768}, {2, 768}});
  const Bound& last = os.bound.back();
  CHECK(last.policy == Policy::interleave && last.nodes == std::vector<int>({1, 2}));
}

TEST_CASE("huge pages are moved whole to an interleave") {
  for (const Huge huge : {Huge::transparent, Huge::reserved}) {
    FakeOs os;
    os.moves_whole_units = true;
    RegionSpec spec = on_node(1, 4 * kUnit);
    spec.huge = huge;
    Region region{spec, os};
    region.move(0, 4 * kUnit, {Policy::interleave, {1, 2}, {}});
    std::map<int, std::size_t> counts;
    for (const auto& [page, node] : nodes_of(region, os)) ++counts[node];
    CHECK(counts == std::map<int, std::size_t>{{1, 1024}, {2, 1024}});
  }
}

TEST_CASE("a page that does not move to its node is an error") {
  FakeOs os;
  Region region{on_node(0, kUnit), os};
  os.stuck = {reinterpret_cast<std::uintptr_t>(region.data()) + 4096};
  CHECK_THROWS_AS(region.move(0, kUnit, {Policy::interleave, {1, 2}, {}}), std::system_error);
}

TEST_CASE("a shared region maps its file and gets huge pages after the first touch") {
  FakeOs os;
  RegionSpec spec = on_node(1, 3 * kUnit);
  spec.huge = Huge::transparent;
  const Region alone{spec, os};
  CHECK(os.mapped_fd == -1 && os.collapsed == 0);
  spec.fd = 7;
  const Region shared{spec, os};
  CHECK(os.mapped_fd == 7 && os.collapsed == 3 * kUnit);
  spec.huge = Huge::none;
  const Region small{spec, os};
  CHECK(os.collapsed == 3 * kUnit);
}

TEST_CASE("a forked child's move does not register with its parent's driver") {
  FakeOs os;
  FakeRegistrar cuda;
  Region region{on_node(0, 4096), os};
  region.register_with(cuda);
  os.process_id = 101;
  region.move(0, 4096, {Policy::bind, {1}, {}});
  CHECK(cuda.adds == 1 && cuda.removes == 0);
  CHECK(nodes_of(region, os) == std::map<std::size_t, int>{{0, 1}});
}

TEST_CASE("an address finds its region only while the region is alive") {
  FakeOs os;
  std::byte* inside = nullptr;
  {
    const auto region = Region::take(on_node(0, 8192), os);
    inside = region->data() + 8191;
    CHECK(Region::at(inside) == region);
    CHECK(Region::at(region->data() + 8192) == nullptr);
  }
  CHECK(Region::at(inside) == nullptr);
}
