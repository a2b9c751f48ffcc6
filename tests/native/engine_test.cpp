// Behaviour that both engines share. Each case runs on each of them.
#include "engine.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_disk.h"

using namespace penstock;

namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kDiskBytes = 64 * kBlock;
constexpr double kLong = 30.0;  // seconds; reached only if the test fails

EngineOptions options_of(unsigned depth = 4) {
  return {.files = {7},
          .align = kBlock,
          .request_bytes = 2 * kBlock,
          .depth = depth,
          .retries = {.first_pause = {}}};
}

struct Bench {  // one engine over one disk
  FakeDisk disk{kDiskBytes};
  std::shared_ptr<FakeRing> ring = std::make_shared<FakeRing>(disk);
  std::unique_ptr<Engine> engine;
  std::vector<std::byte> buffer = std::vector<std::byte>(kDiskBytes);

  explicit Bench(bool rings, EngineOptions options = options_of()) {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = std::byte(i / 7 % 251);
    engine = rings ? make_ring_engine(options, [&](unsigned, std::span<const int>) { return ring; })
                   : make_thread_engine(options, disk);
  }
  std::shared_ptr<Transfer> start(Op op, std::size_t offset, std::size_t bytes,
                                  std::shared_ptr<Checksums> sums = nullptr) {
    const Piece piece{0, offset, buffer.data() + offset, bytes, offset};
    return engine->start(op, {&piece, 1}, std::move(sums));
  }
  bool wait(const std::shared_ptr<Transfer>& transfer) {
    return engine->queue().wait({&transfer, 1}, true, kLong);
  }
  Failure finish(Op op, std::size_t offset, std::size_t bytes,
                 std::shared_ptr<Checksums> sums = nullptr) {
    const auto transfer = start(op, offset, bytes, std::move(sums));
    CHECK(wait(transfer));
    return transfer->failure();
  }
  bool holds(std::size_t offset, std::size_t bytes) {
    return std::equal(disk.bytes().begin() + offset, disk.bytes().begin() + offset + bytes,
                      buffer.begin() + offset);
  }
};

}  // namespace

#define ON_BOTH_ENGINES(name)                                        \
  static void CHECK_JOIN(body_, __LINE__)(bool);                     \
  static const check::Register CHECK_JOIN(threads_, __LINE__){       \
      "threads: " name, [] { CHECK_JOIN(body_, __LINE__)(false); }}; \
  static const check::Register CHECK_JOIN(ring_, __LINE__){          \
      "io_uring: " name, [] { CHECK_JOIN(body_, __LINE__)(true); }}; \
  static void CHECK_JOIN(body_, __LINE__)(bool rings)

ON_BOTH_ENGINES("written bytes are on the disk and are read back") {
  Bench bench{rings};
  const auto before = bench.buffer;
  CHECK(bench.finish(Op::write, kBlock, 31 * kBlock).error == 0);
  CHECK(bench.holds(kBlock, 31 * kBlock));
  std::fill(bench.buffer.begin(), bench.buffer.end(), std::byte{0});
  CHECK(bench.finish(Op::read, kBlock, 31 * kBlock).error == 0);
  CHECK(std::equal(bench.buffer.begin() + kBlock, bench.buffer.begin() + 32 * kBlock,
                   before.begin() + kBlock));
  const Counters counters = bench.engine->queue().counters();
  CHECK(counters.read_bytes == 31 * kBlock && counters.written_bytes == 31 * kBlock);
  CHECK(counters.requests == 32 && counters.again == 0);
}

ON_BOTH_ENGINES("a failing request reports its position, and the others succeed") {
  for (int nth = 1; nth <= 8; ++nth) {
    Bench bench{rings};
    std::uint64_t bad = ~std::uint64_t{0};
    bench.disk.fault = [&](const Asked& asked) {
      if (asked.number == nth) bad = asked.offset;
      return asked.offset == bad ? -EIO : FakeDisk::kPass;
    };
    const Failure failure = bench.finish(Op::write, 0, 16 * kBlock);
    CHECK(failure.error == EIO && failure.offset == bad && failure.bytes == 2 * kBlock);
    for (std::size_t at = 0; at < 16 * kBlock; at += 2 * kBlock) {
      CHECK(bench.holds(at, 2 * kBlock) == (at != bad));
    }
    CHECK(bench.disk.asked() == 8 + 3);  // three retries of the failing request
    CHECK(bench.finish(Op::write, 32 * kBlock, kBlock).error == 0);
  }
}

ON_BOTH_ENGINES("a transient media error is not reported") {
  for (const int error : {EIO, ENODATA, EILSEQ, EREMOTEIO, ETIMEDOUT}) {
    Bench bench{rings};
    bench.disk.fault = [&](const Asked& asked) {
      return asked.number <= 3 ? -error : FakeDisk::kPass;
    };
    CHECK(bench.finish(Op::write, 0, 2 * kBlock).error == 0);
    CHECK(bench.holds(0, 2 * kBlock) && bench.engine->queue().counters().again == 3);
  }
}

ON_BOTH_ENGINES("a disk that fails all requests for a moment is waited for") {
  EngineOptions options = options_of();
  options.retries = {};  // with its pauses
  Bench bench{rings, options};
  const auto back = std::chrono::steady_clock::now() + std::chrono::milliseconds{50};
  bench.disk.fault = [&](const Asked&) {
    return std::chrono::steady_clock::now() < back ? -EIO : FakeDisk::kPass;
  };
  CHECK(bench.finish(Op::write, 0, 16 * kBlock).error == 0 && bench.holds(0, 16 * kBlock));
}

ON_BOTH_ENGINES("a permanent error fails immediately") {
  for (const int error : {ENXIO, ENODEV, ENOSPC, EINVAL, EROFS, EBADF}) {
    Bench bench{rings};
    bench.disk.fault = [&](const Asked&) { return -error; };
    CHECK(bench.finish(Op::write, 0, 2 * kBlock).error == error);
    CHECK(bench.disk.asked() == 1);
  }
}

ON_BOTH_ENGINES("interruptions are retried and not reported") {
  Bench bench{rings};
  bench.disk.fault = [&](const Asked& asked) {
    if (asked.number < 50) return asked.number % 2 != 0 ? ssize_t{-EINTR} : ssize_t{-EAGAIN};
    return FakeDisk::kPass;
  };
  CHECK(bench.finish(Op::write, 0, 2 * kBlock).error == 0 && bench.holds(0, 2 * kBlock));
}

ON_BOTH_ENGINES("a disk that is never ready fails eventually") {
  EngineOptions options = options_of();
  options.retries.stalled = 20;
  Bench bench{rings, options};
  bench.disk.fault = [&](const Asked&) { return -EAGAIN; };
  CHECK(bench.finish(Op::read, 0, 2 * kBlock).error == EAGAIN);
}

ON_BOTH_ENGINES("short transfers of any length continue on a block boundary") {
  for (const ssize_t cut : {1L, 511L, 512L, 4095L, 4096L, 4097L, 8191L}) {
    for (const Op op : {Op::read, Op::write}) {
      Bench bench{rings};
      for (std::size_t i = 0; i < kDiskBytes; ++i) bench.disk.bytes()[i] = std::byte(i % 253);
      bool cut_once = false;  // every requested offset is a multiple of the block
      bool aligned = true;
      bench.disk.fault = [&](const Asked& asked) {
        aligned = aligned && asked.offset % kBlock == 0 && asked.bytes % kBlock == 0;
        return std::exchange(cut_once, true) ? FakeDisk::kPass : cut;
      };
      CHECK(bench.finish(op, 4 * kBlock, 2 * kBlock).error == 0);
      CHECK(aligned && bench.holds(4 * kBlock, 2 * kBlock) && bench.disk.asked() == 2);
    }
  }
}

ON_BOTH_ENGINES("a file that ends early is distinguished from a failing disk") {
  Bench bench{rings};
  bench.disk.bytes().resize(5 * kBlock);
  const Failure failure = bench.finish(Op::read, 4 * kBlock, 2 * kBlock);
  CHECK(failure.error == kEndOfFile && failure.offset == 5 * kBlock && failure.bytes == kBlock);
}

ON_BOTH_ENGINES("a file that ends inside a block is distinguished too") {
  EngineOptions options = options_of();
  options.retries.stalled = 20;
  Bench bench{rings, options};
  bench.disk.bytes().resize(5 * kBlock + 100);
  CHECK(bench.finish(Op::read, 4 * kBlock, 2 * kBlock).error == kEndOfFile);
}

ON_BOTH_ENGINES("a removed device fails its requests and keeps the engine usable") {
  Bench bench{rings};
  bench.disk.fault = [&](const Asked& asked) {
    return asked.number > 5 ? ssize_t{-ENODEV} : FakeDisk::kPass;
  };
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (std::size_t i = 0; i < 10; ++i) {
    transfers.push_back(bench.start(Op::write, i * 4 * kBlock, 4 * kBlock));
  }
  CHECK(bench.engine->queue().wait(transfers, true, kLong));
  int failed = 0;
  for (const auto& transfer : transfers) failed += transfer->failure().error == ENODEV;
  CHECK(failed >= 7 && failed <= 9);
  CHECK(bench.engine->close(kLong).empty());
}

ON_BOTH_ENGINES("a failed transfer does not affect others") {
  Bench bench{rings};
  bench.disk.fault = [&](const Asked& asked) {
    return asked.offset == 8 * kBlock ? ssize_t{-EIO} : FakeDisk::kPass;
  };
  const auto good = bench.start(Op::write, 0, 8 * kBlock);
  const auto bad = bench.start(Op::write, 8 * kBlock, 8 * kBlock);
  const auto also_good = bench.start(Op::write, 16 * kBlock, 8 * kBlock);
  const std::vector<std::shared_ptr<Transfer>> all{good, bad, also_good};
  CHECK(bench.engine->queue().wait(all, true, kLong));
  CHECK(good->failure().error == 0 && also_good->failure().error == 0);
  CHECK(bad->failure().error == EIO && bad->failure().place == 8 * kBlock);
}

ON_BOTH_ENGINES("wait any returns when one transfer is done") {
  Bench bench{rings};
  bench.disk.hang();
  const auto slow = bench.start(Op::write, 0, kBlock);
  const std::vector<std::shared_ptr<Transfer>> all{slow};
  CHECK(!bench.engine->queue().wait(all, false, 0.01));
  bench.disk.release();
  bench.ring->wake();
  CHECK(bench.engine->queue().wait(all, false, kLong) && slow->done());
}

ON_BOTH_ENGINES("a flipped bit is detected, and a second read may succeed") {
  for (const int flips : {1, 100}) {
    Bench bench{rings};
    const auto sums = std::make_shared<Checksums>(kDiskBytes, 2 * kBlock);
    CHECK(bench.finish(Op::write, 0, 16 * kBlock, sums).error == 0);
    std::atomic<int> left{flips};
    bench.disk.after_read = [&](std::byte* at, std::size_t) {
      if (at == bench.buffer.data() + 6 * kBlock && left-- > 0) at[5] ^= std::byte{1};
    };
    const Failure failure = bench.finish(Op::read, 0, 16 * kBlock, sums);
    CHECK(failure.error == (flips == 1 ? 0 : kBadChecksum));
    if (flips > 1) CHECK(failure.place == 6 * kBlock);
  }
}

ON_BOTH_ENGINES("a unit that was never written cannot be read") {
  Bench bench{rings};
  const auto sums = std::make_shared<Checksums>(kDiskBytes, 2 * kBlock);
  CHECK(bench.finish(Op::write, 0, 4 * kBlock, sums).error == 0);
  CHECK(bench.finish(Op::read, 0, 4 * kBlock, sums).error == 0);
  const Failure failure = bench.finish(Op::read, 0, 6 * kBlock, sums);
  CHECK(failure.error == kNeverWritten);
  CHECK(failure.place == 4 * kBlock);
}

ON_BOTH_ENGINES("zeros of a new file can be read after they were noted, and are checked") {
  Bench bench{rings};
  const auto sums = std::make_shared<Checksums>(5 * kBlock, 2 * kBlock);  // the last unit is half
  sums->note_zeros();
  CHECK(bench.finish(Op::read, 0, 5 * kBlock, sums).error == 0);
  bench.disk.after_read = [&](std::byte* at, std::size_t) {
    if (at == bench.buffer.data() + 4 * kBlock) at[5] ^= std::byte{1};
  };
  const Failure failure = bench.finish(Op::read, 0, 5 * kBlock, sums);
  CHECK(failure.error == kBadChecksum);
  CHECK(failure.place == 4 * kBlock);
}

ON_BOTH_ENGINES("a failed write is detected by the next read") {
  Bench bench{rings};
  const auto sums = std::make_shared<Checksums>(kDiskBytes, 2 * kBlock);
  CHECK(bench.finish(Op::write, 0, 2 * kBlock, sums).error == 0);
  bench.disk.fault = [&](const Asked& asked) { return asked.write ? -EIO : FakeDisk::kPass; };
  bench.buffer[17] = std::byte{0xff};
  CHECK(bench.finish(Op::write, 0, 2 * kBlock, sums).error == EIO);
  CHECK(bench.finish(Op::read, 0, 2 * kBlock, sums).error == kBadChecksum);
}

ON_BOTH_ENGINES("closing fails waiting requests and finishes started ones") {
  Bench bench{rings, options_of(/*depth=*/1)};
  bench.disk.hang();
  const auto begun = bench.start(Op::write, 0, 2 * kBlock);
  while (bench.engine->queue().taken() < 1) std::this_thread::yield();
  const auto queued = bench.start(Op::write, 8 * kBlock, 2 * kBlock);
  std::vector<Hanging> hanging;
  std::thread closing{[&] { hanging = bench.engine->close(kLong); }};
  CHECK(bench.wait(queued) && queued->failure().error == ECANCELED && !begun->done());
  bench.disk.release();
  bench.ring->wake();
  closing.join();
  CHECK(hanging.empty() && begun->done() && begun->failure().error == 0);
  CHECK_THROWS_AS(bench.start(Op::read, 0, kBlock), EngineClosed);
}

ON_BOTH_ENGINES("closing on a hung device returns the requests that hang") {
  Bench bench{rings, options_of(/*depth=*/2)};
  bench.disk.hang();
  const auto stuck = bench.start(Op::write, 4 * kBlock, 4 * kBlock);
  while (bench.engine->queue().taken() < 2) std::this_thread::yield();
  const auto queued = bench.start(Op::read, 16 * kBlock, 4 * kBlock);
  const std::vector<Hanging> hanging = bench.engine->close(0.01);
  CHECK(hanging.size() == 2);
  for (const Hanging& h : hanging) {
    CHECK(h.op == Op::write && h.file == 0 && h.bytes == 2 * kBlock);
    CHECK(h.offset == 4 * kBlock || h.offset == 6 * kBlock);
  }
  CHECK(bench.wait(queued) && queued->failure().error == ECANCELED && !stuck->done());
  bench.disk.release();
  bench.ring->wake();
  CHECK(bench.wait(stuck) && bench.engine->close(kLong).empty());
}

TEST_CASE("io_uring: a broken ring fails all current and later requests") {
  Bench bench{true};
  bench.ring->enter_error = ENXIO;
  bench.ring->wake();
  const auto first = bench.start(Op::write, 0, 16 * kBlock);
  CHECK(bench.wait(first) && first->failure().error == ENXIO);
  const auto second = bench.start(Op::read, 0, 2 * kBlock);
  CHECK(bench.wait(second) && second->failure().error == ENXIO);
}

TEST_CASE("io_uring: only registered memory is used as registered") {
  Bench bench{true};
  CHECK(bench.engine->register_memory(bench.buffer.data(), 8 * kBlock) == 0);
  CHECK(bench.finish(Op::write, 0, 8 * kBlock).error == 0);
  CHECK(bench.ring->fixed == 4);
  CHECK(bench.finish(Op::write, 7 * kBlock, 2 * kBlock).error == 0);  // extends beyond it
  CHECK(bench.ring->fixed == 4);
}

TEST_CASE("io_uring: memory that cannot be registered is still usable") {
  Bench bench{true};
  bench.ring->refuse_buffers = ENOMEM;
  CHECK(bench.engine->register_memory(bench.buffer.data(), 8 * kBlock) == ENOMEM);
  CHECK(bench.finish(Op::write, 0, 8 * kBlock).error == 0 && bench.ring->fixed == 0);
}

TEST_CASE("io_uring: a kernel without rings raises an error and leaves no thread behind") {
  const auto refuse = [](unsigned, std::span<const int>) -> std::shared_ptr<Ring> {
    throw std::system_error{EPERM, std::generic_category(), "io_uring_setup"};
  };
  CHECK_THROWS_AS(make_ring_engine(options_of(), refuse), std::system_error);
}

TEST_CASE("workers take about as many reads as writes while both wait, each in order") {
  Queue queue{options_of(), /*slots=*/16};
  std::vector<std::byte> buffer(kDiskBytes);
  std::size_t slot = 0;
  const auto start = [&](Op op, std::size_t offset, std::size_t bytes) {
    const Piece piece{0, offset, buffer.data() + offset, bytes, offset};
    return queue.start(op, {&piece, 1}, nullptr);
  };
  // Takes requests and checks that they are the next ones of a direction.
  const auto takes = [&](std::size_t count, Op op, std::size_t first) {
    for (std::size_t i = 0; i < count; ++i, ++slot) {
      CHECK(queue.try_take(queue.slot(slot)));
      const Request& request = queue.slot(slot).request;
      CHECK(request.transfer->op == op && request.piece.offset == (first + i) * 2 * kBlock);
    }
  };
  start(Op::read, 0, 32 * kBlock);  // 16 requests, enough for all slots
  takes(3, Op::read, 0);
  start(Op::write, 32 * kBlock, 32 * kBlock);
  // Writes catch up, and then the directions take turns, four requests at a time.
  takes(5, Op::write, 16);
  takes(4, Op::read, 3);
  takes(4, Op::write, 21);
  CHECK(queue.taken() == 16);
  for (std::size_t i = 0; i < 16; ++i) queue.drop(queue.slot(i), ECANCELED);
  CHECK(queue.taken() == 0);
}
