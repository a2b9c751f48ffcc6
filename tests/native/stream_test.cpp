#include "stream.h"

#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "fake_os.h"

using namespace penstock;

namespace {

constexpr std::byte kUntouched{0x11};

// Bytes of which no two close to each other are equal, so that a misplaced byte is detected.
std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(i * 37 + (i >> 8));
  return made;
}

std::uint64_t plain_sum(const std::byte* at, std::size_t bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    sum ^= std::to_integer<std::uint64_t>(at[i]) << (i % 8 * 8);
  }
  return sum;
}

template <typename Body>
void for_odd_ranges(Body body) {
  for (const std::size_t offset : {0, 1, 7, 31, 63, 64}) {
    for (const std::size_t bytes : {0, 1, 7, 8, 63, 64, 65, 511, 512, 513, 4096, 10'007}) {
      body(offset, bytes);
    }
  }
}

}  // namespace

TEST_CASE("every instruction set sums every byte") {
  const std::vector<std::byte> source = pattern(20'000);
  for (const Isa isa : usable_isas()) {
    for_odd_ranges([&](std::size_t offset, std::size_t bytes) {
      const std::byte* at = source.data() + offset;
      CHECK(stream_kernels(isa).read(at, bytes) == plain_sum(at, bytes));
    });
  }
}

TEST_CASE("every instruction set writes its range and no other byte") {
  for (const Isa isa : usable_isas()) {
    for_odd_ranges([&](std::size_t offset, std::size_t bytes) {
      std::vector<std::byte> target(20'000, kUntouched);
      stream_kernels(isa).write(target.data() + offset, bytes, kStreamFill);
      for (std::size_t i = 0; i < target.size(); ++i) {
        const bool inside = i >= offset && i < offset + bytes;
        CHECK(target[i] == (inside ? kStreamFill : kUntouched));
      }
    });
  }
}

TEST_CASE("every instruction set copies its range and no other byte") {
  const std::vector<std::byte> source = pattern(20'000);
  for (const Isa isa : usable_isas()) {
    for_odd_ranges([&](std::size_t offset, std::size_t bytes) {
      std::vector<std::byte> target(20'000, kUntouched);
      stream_kernels(isa).copy(target.data() + 3, source.data() + offset, bytes);
      for (std::size_t i = 0; i < target.size(); ++i) {
        const bool inside = i >= 3 && i < 3 + bytes;
        CHECK(target[i] == (inside ? source[offset + i - 3] : kUntouched));
      }
    });
  }
}

TEST_CASE("threads share a copy without gaps in every pass") {
  FakeOs os;
  for (const std::size_t bytes : {1, 4096, 8193, 100'003}) {
    const std::vector<std::byte> source = pattern(bytes);
    for (const unsigned threads : {1U, 2U, 3U, 4U, 40U}) {
      std::vector<std::byte> target(bytes, kUntouched);
      const StreamSpec spec{StreamOp::copy, target.data(), source.data(), bytes, threads, {}, 3};
      const std::vector<double> seconds = stream(os, spec, best_isa());
      CHECK(target == source);
      CHECK(seconds.size() == 3);
      for (const double s : seconds) CHECK(s > 0);
    }
  }
}

TEST_CASE("no thread starts a pass before all threads exist") {
  FakeOs os;
  std::atomic<int> started{0};
  os.when_confined = [&] {
    if (started++ == 0) std::this_thread::sleep_for(std::chrono::milliseconds{600});
  };
  std::vector<std::byte> target(4 * 4096);
  const StreamSpec spec{StreamOp::write, target.data(), nullptr, target.size(), 4, {0}, 1};
  CHECK(stream(os, spec, best_isa()).front() < 0.3);
}

TEST_CASE("a stream without threads is rejected") {
  FakeOs os;
  StreamSpec spec;
  spec.threads = 0;
  CHECK_THROWS_AS(stream(os, spec, best_isa()), std::invalid_argument);
}

TEST_CASE("a chase visits every line once before it returns to the start") {
  FakeOs os;
  constexpr std::size_t kStops = 1000;
  struct alignas(kChaseStep) Line {
    std::byte bytes[kChaseStep];
  };
  std::vector<Line> lines(kStops);
  auto* at = reinterpret_cast<std::byte*>(lines.data());
  lay_chase(at, kStops * kChaseStep);
  std::set<std::size_t> seen;
  std::size_t stop = 0;
  for (std::size_t i = 0; i < kStops; ++i) {
    CHECK(seen.insert(stop).second);
    stop = chase(os, at, stop, 1, {}).second;
  }
  CHECK(stop == 0);
  CHECK(chase(os, at, 0, kStops, {}).second == 0);
}

TEST_CASE("a chase needs two lines and an aligned start") {
  alignas(kChaseStep) std::byte lines[4 * kChaseStep];
  CHECK_THROWS_AS((lay_chase(lines, 2 * kChaseStep - 1)), std::invalid_argument);
  CHECK_THROWS_AS((lay_chase(lines + 8, 3 * kChaseStep)), std::invalid_argument);
}
