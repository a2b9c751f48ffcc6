// The io_uring engine. Each worker owns a ring and a share of the slots, and is the only thread
// that submits to the ring: the kernel cancels the requests of a thread that exits.
#include <algorithm>
#include <atomic>
#include <cerrno>

#include "engine.h"

namespace penstock {
namespace {

// Memory that is registered with the rings. Entries are only ever appended, so readers need no
// lock.
class Buffers {
 public:
  int find(const std::byte* at, std::size_t bytes) const noexcept {
    const unsigned count = count_.load(std::memory_order_acquire);
    for (unsigned i = 0; i < count; ++i) {
      if (at >= known_[i].at && at + bytes <= known_[i].at + known_[i].bytes) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  int add(std::span<const std::shared_ptr<Ring>> rings, std::byte* at, std::size_t bytes) {
    const std::lock_guard hold{adding_};
    for (std::size_t done = 0; done < bytes; done += kMaxBufferBytes) {
      const unsigned index = count_.load(std::memory_order_relaxed);
      if (index == kMaxBuffers) return ENOBUFS;
      const std::size_t part = std::min(kMaxBufferBytes, bytes - done);
      for (const auto& ring : rings) {
        if (const int error = ring->register_buffer(index, at + done, part)) return error;
      }
      known_[index] = {at + done, part};
      count_.store(index + 1, std::memory_order_release);
    }
    return 0;
  }

 private:
  struct Known {
    const std::byte* at;
    std::size_t bytes;
  };
  std::mutex adding_;
  Known known_[kMaxBuffers] = {};
  std::atomic<unsigned> count_{0};
};

// The loop of one worker. The disk comes first: requests that need a checksum are prepared while
// others are in the kernel, and answers are processed only after the disk has new work. Therefore
// there are twice as many slots as requests in the kernel. With fewer, a burst of answers would
// leave the disk idle while their checksums are computed, which was measured to cost a third of the
// rate.
class RingWorker {
 public:
  RingWorker(Queue& queue, Ring& ring, const Buffers& buffers, unsigned first, unsigned depth)
      : queue_{queue}, ring_{ring}, buffers_{buffers}, first_{first}, depth_{depth} {
    for (unsigned i = 0; i < kSlotsEach * depth; ++i) idle_.push_back(first + i);
  }

  static constexpr unsigned kSlotsEach = 2;

  void run() {
    for (;;) {
      collect();
      if (hand_over()) ring_.enter(/*wait=*/false);
      if (with_kernel_ < depth_ && prepare_one()) continue;
      if (look_at_one()) continue;
      if (prepare_one()) continue;
      if (queue_.closing()) {
        drop_ready();
        if (with_kernel_ == 0) return;
      }
      const int error = -ring_.enter(/*wait=*/true);
      // EAGAIN and EBUSY: the kernel wants its answers to be collected first. EINTR: a signal
      // arrived.
      if (error > 0 && error != EINTR && error != EAGAIN && error != EBUSY) give_up(error);
    }
  }

 private:
  void collect() {
    Completion completion;
    while (ring_.pop(completion)) {
      --with_kernel_;
      answers_.push_back(completion);
    }
  }

  bool hand_over() {
    bool any = false;
    for (; with_kernel_ < depth_ && !ready_.empty(); any = true) {
      push(ready_.front());
      ready_.pop_front();
    }
    return any;
  }

  bool prepare_one() {
    if (idle_.empty() || !queue_.try_take(queue_.slot(idle_.back()))) return false;
    const unsigned index = idle_.back();
    idle_.pop_back();
    const Request& request = queue_.slot(index).request;
    const Transfer& transfer = *request.transfer;
    if (transfer.op == Op::write && transfer.checksums) {
      transfer.checksums->note(request.piece.at, request.piece.bytes, request.piece.place);
    }
    ready_.push_back(index);
    return true;
  }

  bool look_at_one() {
    if (answers_.empty()) return false;
    const Completion completion = answers_.front();
    answers_.pop_front();
    const auto index = static_cast<unsigned>(completion.tag);
    if (queue_.answer(queue_.slot(index), completion.answer)) {
      ready_.push_front(index);
    } else {
      idle_.push_back(index);
    }
    return true;
  }

  void push(unsigned index) {
    const Request& request = queue_.slot(index).request;
    queue_.slot(index).with_kernel = true;
    ring_.push({request.transfer->op, request.piece.file, request.offset(), request.at(),
                request.bytes(), buffers_.find(request.at(), request.bytes()), index});
    ++with_kernel_;
  }

  void drop_ready() {
    for (const unsigned index : ready_) {
      queue_.drop(queue_.slot(index), ECANCELED);
      idle_.push_back(index);
    }
    ready_.clear();
  }

  // The ring is unusable. Requests that it held may still move bytes, but nothing reports when they
  // are done.
  void give_up(int error) {
    for (unsigned index = first_; index < first_ + kSlotsEach * depth_; ++index) {
      if (std::find(idle_.begin(), idle_.end(), index) != idle_.end()) continue;
      queue_.broken(queue_.slot(index), error);
      idle_.push_back(index);
    }
    ready_.clear();
    answers_.clear();
    with_kernel_ = 0;
  }

  Queue& queue_;
  Ring& ring_;
  const Buffers& buffers_;
  const unsigned first_;
  const unsigned depth_;
  unsigned with_kernel_ = 0;
  std::vector<unsigned> idle_;
  std::deque<unsigned> ready_;      // taken and prepared, but not submitted yet
  std::deque<Completion> answers_;  // received from the kernel, not processed yet
};

class RingEngine final : public Engine {
 public:
  RingEngine(const EngineOptions& options, const RingMaker& make_ring)
      : Engine{options, RingWorker::kSlotsEach * options.depth} {
    const EngineOptions& set = queue_->options;
    const unsigned share = set.depth / set.workers;
    // Create all rings before any thread, so that there is nothing to undo if the kernel refuses
    // one.
    for (unsigned i = 0; i < set.workers; ++i) rings_.push_back(make_ring(share, set.files));
    for (unsigned i = 0; i < set.workers; ++i) {
      launch([ring = rings_[i], buffers = buffers_, first = i * RingWorker::kSlotsEach * share,
              share](Queue& queue) { RingWorker{queue, *ring, *buffers, first, share}.run(); });
    }
  }
  ~RingEngine() override { close(kLastChance); }

  std::shared_ptr<Transfer> start(Op op, std::span<const Piece> pieces,
                                  std::shared_ptr<Checksums> checksums) override {
    auto transfer = Engine::start(op, pieces, std::move(checksums));
    wake();
    return transfer;
  }

  int register_memory(std::byte* at, std::size_t bytes) override {
    const std::lock_guard hold{rings_kept_};
    return rings_.empty() ? EBADF : buffers_->add(rings_, at, bytes);
  }

 private:
  void wake() override {
    const std::lock_guard hold{rings_kept_};
    for (const auto& ring : rings_) ring->wake();
  }
  void let_go() override {
    const std::lock_guard hold{rings_kept_};
    rings_.clear();
  }

  std::mutex rings_kept_;  // guards rings_
  std::vector<std::shared_ptr<Ring>> rings_;
  const std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
};

}  // namespace

std::unique_ptr<Engine> make_ring_engine(EngineOptions options, const RingMaker& make_ring) {
  options.workers = std::clamp(options.workers, 1U, std::max(1U, options.depth));
  options.depth = std::max(1U, options.depth) / options.workers * options.workers;
  return std::make_unique<RingEngine>(std::move(options), make_ring);
}

}  // namespace penstock
