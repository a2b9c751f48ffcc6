#include "sweep.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "check.h"
#include "fake_os.h"

using namespace penstock;

namespace {

// The memory of one tensor in the exact format. It is exactly as long as needed, so that a
// sanitizer detects an overrun.
struct Exact {
  explicit Exact(std::size_t n) : grad(n), weight(n, 0x3F80), low(n), first(n), second(n) {
    for (std::size_t i = 0; i < n; ++i) {
      grad[i] = static_cast<std::uint16_t>(0x3C00 + (i * 37) % 1024 + (i % 3 == 0 ? 0x8000 : 0));
    }
  }
  Segment segment() {
    Segment s;
    s.count = grad.size();
    s.grad = grad.data();
    s.weight = weight.data();
    s.rest = low.data();
    s.first = first.data();
    s.second = second.data();
    s.by.rate = 1e-2F;
    s.by.fresh1 = 0.1F;
    s.by.fresh2 = 1e-3F;
    s.by.eps = 1e-8F;
    s.by.decay = 1e-4F;
    return s;
  }
  bool operator==(const Exact&) const = default;
  std::vector<std::uint16_t> grad, weight;
  std::vector<std::int16_t> low;
  std::vector<float> first, second;
};

SweepResult run(Pool& pool, std::shared_ptr<SegmentJob> job) {
  pool.start(job);
  job->wait();
  return job->result();
}

const SweepResult sweep(Pool& pool, std::vector<Segment> segments, Isa isa) {
  return run(pool,
             std::make_shared<SweepJob>(std::move(segments), SweepFormat{}, /*stats=*/true, isa));
}

double value_of(const ExactSum& sum) {
  double value = 0;
  for (std::size_t i = ExactSum::kLimbs; i-- > 0;) {
    value += std::ldexp(static_cast<double>(sum.limbs()[i]), static_cast<int>(32 * i) - 352);
  }
  return value;
}

class CountJob final : public Job {
 public:
  CountJob(std::size_t blocks, const std::atomic<int>* before)
      : Job{blocks}, seen(blocks), before_{before} {}
  void work(Blocks& mine) noexcept override {
    for (Blocks::Run run = mine.next(); run.begin < run.end; run = mine.next()) {
      for (std::size_t i = run.begin; i < run.end; ++i) {
        if (before_ != nullptr && *before_ != 100) early = true;
        ++seen[i];
        ++total;
      }
    }
  }
  std::vector<std::atomic<int>> seen;
  std::atomic<int> total{0};
  std::atomic<bool> early{false};

 private:
  const std::atomic<int>* before_;
};

// A job of one block that ends when the test releases it, and counts as a hundred.
class GateJob final : public Job {
 public:
  explicit GateJob(const std::atomic<bool>& open) : Job{1}, open_{open} {}
  void work(Blocks& mine) noexcept override {
    if (const Blocks::Run run = mine.next(); run.begin < run.end) {
      open_.wait(false);
      total = 100;
    }
  }
  std::atomic<int> total{0};

 private:
  const std::atomic<bool>& open_;
};

}  // namespace

TEST_CASE("a pool runs each block once and jobs one after the other") {
  FakeOs os;
  for (const unsigned threads : {1U, 2U, 9U}) {
    Pool pool{os, threads, {}, 0};
    for (int round = 0; round < 50; ++round) {
      auto first = std::make_shared<CountJob>(100, nullptr);
      auto second = std::make_shared<CountJob>(100, &first->total);
      pool.start(first);
      pool.start(second);
      second->wait();
      CHECK(first->done() && !second->early);
      CHECK(first->began() <= first->ended() && first->ended() <= second->began());
      CHECK(second->began() <= second->ended());
      for (const auto& seen : first->seen) CHECK(seen == 1);
      for (const auto& seen : second->seen) CHECK(seen == 1);
    }
  }
}

TEST_CASE("an independent job may overlap with earlier ones, and the next job waits for all") {
  FakeOs os;
  for (const unsigned threads : {2U, 9U}) {
    Pool pool{os, threads, {}, 0};
    for (int round = 0; round < 50; ++round) {
      std::atomic<bool> open{false};
      auto slow = std::make_shared<GateJob>(open);
      auto beside = std::make_shared<CountJob>(100, nullptr);
      auto after = std::make_shared<CountJob>(100, &slow->total);
      pool.start(slow);
      pool.start(beside, /*beside=*/true);
      pool.start(after);
      beside->wait();  // would never return if it had to wait for the slow one
      CHECK(!slow->done());
      CHECK(after->total == 0);
      open = true;
      open.notify_all();
      after->wait();
      CHECK(slow->done() && !after->early);
      for (const auto& seen : beside->seen) CHECK(seen == 1);
    }
  }
}

TEST_CASE("a pool finishes started jobs before it is destroyed") {
  FakeOs os;
  auto job = std::make_shared<CountJob>(1000, nullptr);
  {
    Pool pool{os, 2, {0}, 3};
    pool.start(job);
  }
  CHECK(job->done() && job->total == 1000);
}

TEST_CASE("a job without blocks is done immediately") {
  FakeOs os;
  Pool pool{os, 1, {}, 0};
  auto job = std::make_shared<CountJob>(0, nullptr);
  pool.start(job);
  job->wait();
}

TEST_CASE("a pool rejects invalid numbers of threads and nice values") {
  FakeOs os;
  CHECK_THROWS_AS((Pool{os, 0, {}, 0}), std::invalid_argument);
  CHECK_THROWS_AS((Pool{os, Pool::kMaxThreads + 1, {}, 0}), std::invalid_argument);
  CHECK_THROWS_AS((Pool{os, 1, {}, 20}), std::invalid_argument);
  CHECK_THROWS_AS((Pool{os, 1, {}, -1}), std::invalid_argument);
}

TEST_CASE("instruction set, threads and chunks do not change the result") {
  FakeOs os;
  const std::size_t n = 3 * kSweepBlock + 77;
  Exact whole{n};
  Pool one{os, 1, {}, 0};
  const SweepResult wanted = sweep(one, {whole.segment()}, Isa::baseline);
  for (const Isa isa : usable_isas()) {
    for (const unsigned threads : {1U, 3U}) {
      Pool pool{os, threads, {}, 0};
      Exact cut{n};
      Segment head = cut.segment();
      head.count = 5 * kLeaf;
      Segment tail = cut.segment();
      tail.count = n - head.count;
      tail.first_index = head.count;
      tail.grad = cut.grad.data() + head.count;
      tail.weight = cut.weight.data() + head.count;
      tail.rest = cut.low.data() + head.count;
      tail.first = cut.first.data() + head.count;
      tail.second = cut.second.data() + head.count;
      const SweepResult got = sweep(pool, {head, tail}, isa);
      CHECK(cut == whole);
      CHECK(got.sum_squares.limbs() == wanted.sum_squares.limbs());
      CHECK(got.max_bits == wanted.max_bits);
    }
  }
}

TEST_CASE("an element whose weight would not be finite keeps its state, the others are updated") {
  FakeOs os;
  Pool pool{os, 2, {}, 0};
  const std::size_t n = kSweepBlock + 100;
  for (const Isa isa : usable_isas()) {
    Exact before{n};
    before.grad[kSweepBlock + 7] = 0x7FC0;  // NaN
    before.grad[20] = 0xFFC0;
    Exact after = before;
    const SweepResult got = sweep(pool, {after.segment()}, isa);
    CHECK((got.bad_master == Spot{0, 20}));
    CHECK((got.bad_grad == Spot{0, 20}));
    for (const std::size_t i : {std::size_t{20}, kSweepBlock + 7}) {
      CHECK(after.weight[i] == before.weight[i] && after.low[i] == before.low[i]);
      CHECK(after.first[i] == 0 && after.second[i] == 0);
    }
    CHECK(after.first[21] != 0 && after.low[21] != before.low[21]);
  }
}

TEST_CASE("an exact sum does not depend on the order") {
  const std::vector<double> values{0x1p-298, 0x1p-149, 0.1, 1e30, 0x1.fffffffffffffp+200, 3, 0};
  ExactSum forth, back, halves, other;
  for (const double value : values) forth.add(value);
  for (auto value = values.rbegin(); value != values.rend(); ++value) back.add(*value);
  for (std::size_t i = 0; i < values.size(); ++i) (i % 2 ? halves : other).add(values[i]);
  halves.add(other);
  CHECK(forth.limbs() == back.limbs() && forth.limbs() == halves.limbs());
  CHECK(value_of(forth) == std::accumulate(values.rbegin(), values.rend(), 0.0));
  ExactSum tiny;
  tiny.add(0x1p-298);
  CHECK(value_of(tiny) == 0x1p-298);
}

TEST_CASE("statistics of odd lengths at odd offsets are correct") {
  FakeOs os;
  Pool pool{os, 2, {}, 0};
  std::vector<float> grad(2 * kLeaf + 40, 1.0F);
  for (const Isa isa : usable_isas()) {
    for (const std::size_t count : {1UL, 31UL, 33UL, 4095UL, 4097UL, 8192UL + 39}) {
      Segment s;
      s.count = count;
      s.grad = grad.data() + 1;
      const SweepResult got =
          run(pool, std::make_shared<StatsJob>(std::vector{s}, GradType::fp32, isa));
      CHECK(value_of(got.sum_squares) == static_cast<double>(count));
      CHECK(got.max_bits == 0x3F800000 && got.bad_grad == Spot{});
    }
  }
}

TEST_CASE("statistics of 16-bit gradients do not read beyond the end") {
  FakeOs os;
  Pool pool{os, 2, {}, 0};
  for (const Isa isa : usable_isas()) {
    for (const std::size_t count : {1UL, 31UL, 33UL, 127UL, 129UL, 4095UL, 4097UL, 8192UL + 39}) {
      for (const auto& [type, one] : {std::pair{GradType::bf16, std::uint16_t{0xBF80}},
                                      std::pair{GradType::fp16, std::uint16_t{0xBC00}}}) {
        const std::vector<std::uint16_t> grad(count, one);  // exactly as long as needed: see Exact
        Segment s;
        s.count = count;
        s.grad = grad.data();
        const SweepResult got = run(pool, std::make_shared<StatsJob>(std::vector{s}, type, isa));
        CHECK(value_of(got.sum_squares) == static_cast<double>(count));
        CHECK(got.max_bits == 0x3F800000 && got.bad_grad == Spot{});
      }
    }
  }
}

TEST_CASE("running the traffic of the upper bound twice restores the bytes") {
  FakeOs os;
  Pool pool{os, 2, {}, 0};
  const Exact before{kSweepBlock + 1000};
  for (const Isa isa : usable_isas()) {
    Exact after = before;
    for (int i = 0; i < 2; ++i) {
      run(pool, std::make_shared<MixJob>(std::vector{after.segment()}, GradType::bf16, isa));
    }
    CHECK(after == before);
  }
}

TEST_CASE("overlapping buffers are found, adjacent ones are not") {
  Exact one{100}, two{100};
  Segment a = one.segment(), b = two.segment();
  CHECK(!find_overlap({a, b}, {}));
  b.grad = a.grad;  // two readers
  CHECK(!find_overlap({a, b}, {}));
  b.second = static_cast<float*>(a.first) + 99;
  const auto found = find_overlap({a, b}, {});
  CHECK(found && found->segment == 0 && found->other_segment == 1);
  CHECK(found->role == "first moment" && found->other_role == "second moment");
  b = two.segment();
  b.grad = b.weight;
  CHECK(find_overlap({a, b}, {}).has_value());
}
