#include "workers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_os.h"
#include "residency.h"

using namespace penstock;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kPage = 4096;
const Placement kStripe{Policy::bind, {1, 2}, {1, 1, 2}};

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

TEST_CASE("every item is processed once with any number of threads") {
  FakeOs os;
  for (const unsigned threads : {1U, 2U, 7U, 64U}) {
    std::vector<std::atomic<int>> seen(1000);
    in_parallel(os, seen.size(), threads, [&](std::size_t i) { ++seen[i]; });
    for (const auto& count : seen) CHECK(count == 1);
  }
}

TEST_CASE("every team processes its own list") {
  FakeOs os;
  std::vector<std::atomic<int>> first(100), second(7);
  const std::vector<Team> teams{
      {100, 3, {}, [&](std::size_t i) { ++first[i]; }},
      {7, 9, {0, 1}, [&](std::size_t i) { ++second[i]; }},
      {0, 2, {}, [](std::size_t) { throw std::runtime_error{"called"}; }}};
  run_teams(os, teams);
  for (const auto& count : first) CHECK(count == 1);
  for (const auto& count : second) CHECK(count == 1);
}

TEST_CASE("a failure in one team stops the others") {
  FakeOs os;
  std::atomic<bool> failing{false};
  std::atomic<int> done{0};
  const auto slow = [&](std::size_t) {
    while (!failing) std::this_thread::yield();
    std::this_thread::sleep_for(1ms);
    ++done;
  };
  const auto fails = [&](std::size_t) {
    failing = true;
    throw std::runtime_error{"no"};
  };
  const std::vector<Team> teams{{1000, 1, {}, slow}, {1, 1, {}, fails}};
  CHECK_THROWS_AS(run_teams(os, teams), std::runtime_error);
  CHECK(done < 1000);
}

TEST_CASE("the requested number of threads runs concurrently") {
  FakeOs os;
  std::atomic<int> there{0};
  std::atomic<int> met{0};
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  in_parallel(os, 4, 4, [&](std::size_t) {
    ++there;
    while (there < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (there == 4 && std::chrono::steady_clock::now() < deadline) ++met;
  });
  CHECK(met == 4);
}

TEST_CASE("a team runs on its CPUs, with at most one thread per CPU") {
  FakeOs os;
  const auto nothing = [](std::size_t) {};
  const std::vector<Team> teams{{50, 9, {4, 5}, nothing}, {50, 3, {6, 7, 8, 9}, nothing}};
  run_teams(os, teams);
  CHECK(std::count(os.ran_on.begin(), os.ran_on.end(), std::vector<int>{4, 5}) == 2);
  CHECK(std::count(os.ran_on.begin(), os.ran_on.end(), std::vector<int>{6, 7, 8, 9}) == 3);
  CHECK(os.ran_on.size() == 5);
}

TEST_CASE("a team without work finishes") {
  FakeOs os;
  in_parallel(os, 0, 4, [](std::size_t) { throw std::runtime_error{"called"}; });
}

TEST_CASE("an exception in a worker reaches the caller and stops the others") {
  FakeOs os;
  std::atomic<bool> failing{false};
  std::atomic<int> done{0};
  const auto work = [&](std::size_t i) {
    if (i == 0) {
      failing = true;
      throw std::runtime_error{"first"};
    }
    while (!failing) std::this_thread::yield();
    std::this_thread::sleep_for(1ms);
    ++done;
  };
  CHECK_THROWS_AS(in_parallel(os, 1000, 2, work), std::runtime_error);
  CHECK(done < 999);
}

TEST_CASE("pages are counted over all batches, including partial pages") {
  FakeOs os;
  os.give(10 * kPage, 6'000 * kPage, 0);
  os.give(6'010 * kPage, 3'000 * kPage, 3);
  const auto counts = count_pages(os, at(10 * kPage + 100), 10'000 * kPage, 3);
  CHECK(counts == std::map<int, std::size_t>{{0, 6'000}, {3, 3'000}, {kUnmapped, 1'001}});
}

TEST_CASE("a failing page query reaches the caller") {
  FakeOs os;
  os.fail("page_nodes", 2, EPERM);
  CHECK_THROWS_AS(count_pages(os, at(kPage), 10'000 * kPage, 2), std::system_error);
}

TEST_CASE("a stripe over memory of another allocator counts units from aligned addresses") {
  FakeOs os;
  const std::uintptr_t first = 5 * kUnitBytes + 3 * kPage;  // so that batches end inside units
  os.give(first, 20 * kUnitBytes, 0);
  CHECK(migrate_pages(os, at(first), 20 * kUnitBytes, kStripe, kUnitBytes, 2) == 0);
  for (const auto& [page, node] : os.pages) {
    CHECK(node == kStripe.pattern[page / kUnitBytes % 3]);
  }
}

TEST_CASE("pages distributed one by one alternate between nodes") {
  FakeOs os;
  os.give(7 * kPage, 9'000 * kPage, 1);
  const Placement deal{Policy::interleave, {1, 2, 5}, {}};
  CHECK(migrate_pages(os, at(7 * kPage), 9'000 * kPage, deal, kPage, 2) == 0);
  std::map<int, int> counts;
  int before = 0;
  for (const auto& [page, node] : os.pages) {
    CHECK(node != before);
    before = node;
    ++counts[node];
  }
  CHECK(counts == std::map<int, int>{{1, 3'000}, {2, 3'000}, {5, 3'000}});
}

TEST_CASE("only the requested range moves") {
  FakeOs os;
  os.give(0x10000, 10 * kPage, 0);
  const Placement node{Policy::bind, {1}, {}};
  CHECK(migrate_pages(os, at(0x10000 + 2 * kPage + 1), 3 * kPage, node, kUnitBytes, 1) == 0);
  for (const auto& [page, found] : os.pages) {
    const std::size_t index = (page - 0x10000) / kPage;
    CHECK(found == (index >= 2 && index <= 5 ? 1 : 0));
  }
}

TEST_CASE("pages that did not move are counted, unless they are in place or unmapped") {
  FakeOs os;
  os.give(kPage, 5'000 * kPage, 0);
  os.pages[2 * kPage] = 1;    // in place already, and cannot move
  os.pages.erase(3 * kPage);  // never touched
  os.stuck = {2 * kPage, 5 * kPage, 4'990 * kPage};
  const Placement node{Policy::bind, {1}, {}};
  CHECK(migrate_pages(os, at(kPage), 5'000 * kPage, node, kUnitBytes, 2) == 2);
}

TEST_CASE("moved huge pages count as moved, whatever status the kernel returns for small pages") {
  FakeOs os;
  os.moves_whole_units = true;
  const std::uintptr_t first = 5 * kUnitBytes + 3 * kPage;
  os.give(first, 4 * kUnitBytes, 0);
  CHECK(migrate_pages(os, at(first), 4 * kUnitBytes, kStripe, kUnitBytes, 1) == 0);
}
