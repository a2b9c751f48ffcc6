#include "workers.h"

#include <atomic>
#include <vector>

#include "check.h"
#include "fake_os.h"
#include "residency.h"

using namespace penstock;

TEST_CASE("every item is worked on once, whatever the threads") {
  FakeOs os;
  for (const unsigned threads : {1U, 2U, 7U, 64U}) {
    std::vector<std::atomic<int>> seen(1000);
    in_parallel(os, seen.size(), threads, [&](std::size_t i) { ++seen[i]; });
    for (const auto& count : seen) CHECK(count == 1);
  }
}

TEST_CASE("every team works through its own list") {
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

TEST_CASE("one team's failure stops the others") {
  FakeOs os;
  std::atomic<int> done{0};
  const std::vector<Team> teams{{1'000'000, 1, {}, [&](std::size_t) { ++done; }},
                                {1, 1, {}, [](std::size_t) { throw std::runtime_error{"no"}; }}};
  CHECK_THROWS_AS(run_teams(os, teams), std::runtime_error);
}

TEST_CASE("nothing to do is done") {
  FakeOs os;
  in_parallel(os, 0, 4, [](std::size_t) { throw std::runtime_error{"called"}; });
}

TEST_CASE("an exception in a worker reaches the caller and stops the rest") {
  FakeOs os;
  std::atomic<int> done{0};
  const auto work = [&](std::size_t i) {
    if (i == 10) throw std::runtime_error{"eleventh"};
    ++done;
  };
  CHECK_THROWS_AS(in_parallel(os, 1'000'000, 2, work), std::runtime_error);
  CHECK(done < 1'000'000);
}

TEST_CASE("pages are counted over all batches, partial pages included") {
  FakeOs os;
  auto* at = reinterpret_cast<void*>(std::uintptr_t{4096 * 10 + 100});
  const auto counts = count_pages(os, at, 10'000 * 4096, 3);  // reaches into 10,001 pages
  CHECK(counts.at(0) + counts.at(kUnmapped) == 10'001);
}

TEST_CASE("a failing question reaches the caller") {
  FakeOs os;
  os.fail("page_nodes", 2, EPERM);
  auto* at = reinterpret_cast<void*>(std::uintptr_t{4096});
  CHECK_THROWS_AS(count_pages(os, at, 10'000 * 4096, 2), std::system_error);
}

TEST_CASE("pages of another allocator are dealt as the stripe says") {
  FakeOs os;
  auto* at = reinterpret_cast<void*>(std::uintptr_t{4096});
  CHECK(migrate_pages(os, at, 3 * kUnitBytes, {Policy::bind, {1, 2}, {1, 2}}, 2) == 0);
}
