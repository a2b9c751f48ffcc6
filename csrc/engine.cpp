#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace penstock {
namespace {

auto deadline_in(double seconds) {
  // At most a year: chrono's arithmetic overflows for "forever".
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(std::clamp(seconds, 0.0, 3.15e7)));
}

// Backs off for up to a second in total while EAGAIN persists. The first retry is immediate.
void pause_before(unsigned stalls) {
  if (stalls > 1) std::this_thread::sleep_for(std::chrono::microseconds{std::min(stalls, 100U)});
}

}  // namespace

Queue::Queue(EngineOptions given, std::size_t slots) : options{std::move(given)}, slots_(slots) {}

std::shared_ptr<Transfer> Queue::start(Op op, std::span<const Piece> pieces,
                                       std::shared_ptr<Checksums> checksums) {
  const std::size_t count = count_requests(pieces, options.request_bytes);
  auto transfer = std::make_shared<Transfer>(op, count, std::move(checksums));
  std::vector<Request> requests = cut(transfer, pieces, options.request_bytes);
  const std::lock_guard hold{state_};
  if (closing_) throw EngineClosed{};
  auto& waiting = direction(op).waiting;
  for (Request& request : requests) waiting.push_back(std::move(request));
  if (broken_ != 0) drop_waiting(broken_);
  requests.size() == 1 ? work_.notify_one() : work_.notify_all();
  return transfer;
}

bool Queue::wait(std::span<const std::shared_ptr<Transfer>> transfers, bool all, double seconds) {
  const auto done = [](const auto& transfer) { return transfer->done(); };
  const auto enough = [&] {
    return all ? std::all_of(transfers.begin(), transfers.end(), done)
               : std::any_of(transfers.begin(), transfers.end(), done);
  };
  std::unique_lock hold{state_};
  return settled_.wait_until(hold, deadline_in(seconds), enough);
}

std::vector<Hanging> Queue::close(double seconds) {
  std::unique_lock hold{state_};
  closing_ = true;
  drop_waiting(ECANCELED);
  work_.notify_all();
  stop_pause_.notify_all();
  settled_.wait_until(hold, deadline_in(seconds),
                      [&] { return reads_.taken + writes_.taken == 0; });
  std::vector<Hanging> hanging;
  for (const Slot& slot : slots_) {
    if (!slot.busy || !slot.with_kernel) continue;
    const Piece& piece = slot.request.piece;
    hanging.push_back({slot.request.transfer->op, piece.file, piece.offset, piece.bytes});
  }
  return hanging;
}

Counters Queue::counters() const {
  const std::lock_guard hold{state_};
  return counters_;
}

std::size_t Queue::taken() const {
  const std::lock_guard hold{state_};
  return reads_.taken + writes_.taken;
}

bool Queue::closing() const {
  const std::lock_guard hold{state_};
  return closing_;
}

Op Queue::next_op() const {
  if (writes_.waiting.empty()) return Op::read;
  if (reads_.waiting.empty()) return Op::write;
  // Stay with one direction until it is a little ahead: the kernel merges adjacent requests only if
  // they are submitted one after the other.
  const bool reading = last_taken_ == Op::read;
  const std::size_t own = reading ? reads_.taken : writes_.taken;
  const std::size_t other = reading ? writes_.taken : reads_.taken;
  return (own < other + kLead) == reading ? Op::read : Op::write;
}

void Queue::take_front(Slot& slot) {
  last_taken_ = next_op();
  Direction& from = direction(last_taken_);
  slot.request = std::move(from.waiting.front());
  from.waiting.pop_front();
  slot.busy = true;
  ++from.taken;
}

bool Queue::take(Slot& slot) {
  std::unique_lock hold{state_};
  work_.wait(hold, [&] { return closing_ || anything_waits(); });
  if (!anything_waits()) return false;
  take_front(slot);
  return true;
}

bool Queue::try_take(Slot& slot) {
  const std::lock_guard hold{state_};
  if (!anything_waits()) return false;
  take_front(slot);
  return true;
}

bool Queue::answer(Slot& slot, ssize_t answer) {
  const unsigned tries = slot.request.tries;
  const Next next = settle(slot.request, answer, options.align, options.retries);
  if (next == Next::again) {
    if (answer < 0 && slot.request.tries > tries) {
      wait_out_error(slot.request.tries);
    } else {
      pause_before(slot.request.stalls);
    }
    const std::lock_guard hold{state_};
    ++counters_.again;
    return true;
  }
  release(slot, next == Next::failed);
  return false;
}

void Queue::wait_out_error(unsigned tries) {
  // Drives that reset fail all their requests for some ten milliseconds or longer. Time runs from
  // the first error since a request last succeeded, not from this one: on a dead drive, many
  // requests that fail one after another must not each wait for two seconds.
  std::unique_lock hold{state_};
  const auto now = std::chrono::steady_clock::now();
  if (!failing_since_) failing_since_ = now;
  auto pause = options.retries.first_pause;
  for (unsigned i = 1; i < tries; ++i) pause *= 4;
  stop_pause_.wait_until(hold, *failing_since_ + pause, [&] { return closing_; });
}

void Queue::drop(Slot& slot, int error) {
  const Piece& piece = slot.request.piece;
  slot.request.transfer->fail({error, piece.file, piece.offset, piece.place, piece.bytes});
  release(slot, /*failed=*/true);
}

void Queue::broken(Slot& slot, int error) {
  drop(slot, error);
  const std::lock_guard hold{state_};
  broken_ = error;
  drop_waiting(error);
}

void Queue::release(Slot& slot, bool failed) {
  const std::lock_guard hold{state_};
  Request request = std::exchange(slot.request, {});
  slot.busy = false;
  slot.with_kernel = false;
  --direction(request.transfer->op).taken;
  ++counters_.requests;
  if (!failed) {
    failing_since_.reset();
    (request.transfer->op == Op::read ? counters_.read_bytes : counters_.written_bytes) +=
        request.piece.bytes;
  }
  // Notify under the lock, so that a waiter cannot check its condition between the count and the
  // notification.
  if (request.transfer->finish_one() || reads_.taken + writes_.taken == 0) settled_.notify_all();
}

void Queue::drop_waiting(int error) {
  for (Direction* each : {&reads_, &writes_}) {
    for (Request& request : each->waiting) {
      const Piece& piece = request.piece;
      request.transfer->fail({error, piece.file, piece.offset, piece.place, piece.bytes});
      request.transfer->finish_one();
    }
    each->waiting.clear();
  }
  settled_.notify_all();
}

int Engine::register_memory(std::byte*, std::size_t) { return EOPNOTSUPP; }

void Engine::launch(std::function<void(Queue&)> serve) {
  try {
    team_.emplace_back([queue = queue_, serve = std::move(serve)] { serve(*queue); });
  } catch (const std::system_error&) {
    if (team_.empty()) throw;  // a limit on threads: fewer threads can do the same work
  }
}

std::vector<Hanging> Engine::close(double seconds) {
  // A forked child has the memory but not the threads: there is nothing to wait for, and a lock may
  // have been copied while it was held.
  const bool is_ours = owner_ == linux_os().process();
  std::vector<Hanging> hanging;
  if (is_ours) {
    // Close the queue before joining: workers that sleep in the kernel must see that it is closed.
    queue_->close(0);
    wake();
    hanging = queue_->close(seconds);
  }
  for (std::thread& worker : team_) {
    if (!worker.joinable()) continue;
    if (!is_ours) {
      worker.detach();
      continue;
    }
    // A worker that is stuck in the kernel cannot be stopped. It keeps the queue alive and touches
    // nothing else.
    hanging.empty() ? worker.join() : worker.detach();
  }
  if (is_ours && hanging.empty()) let_go();
  return hanging;
}

}  // namespace penstock
