// A disk in memory that fails on demand, for both engines: threads call it, and FakeRing answers
// from it. Faults are defined by the number of the request (from 1) or by its offset.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "engine.h"

namespace penstock {

struct Asked {
  int number;  // from 1
  bool write;
  std::uint64_t offset;
  std::size_t bytes;
};

class FakeDisk final : public Disk {
 public:
  explicit FakeDisk(std::size_t bytes) : bytes_(bytes) {}

  // Answers a request instead of the disk: with a number of bytes to move (a short transfer) or a
  // negative errno. kPass lets the disk answer.
  static constexpr ssize_t kPass = 1 << 30;
  std::function<ssize_t(const Asked&)> fault = [](const Asked&) { return kPass; };
  std::function<void(std::byte*, std::size_t)> after_read = [](std::byte*, std::size_t) {};

  std::vector<std::byte>& bytes() { return bytes_; }
  int asked() const { return asked_; }

  // Requests block until release().
  void hang() { hanging_ = true; }
  void release() {
    {
      const std::lock_guard hold{state_};
      hanging_ = false;
    }
    released_.notify_all();
  }
  // For a ring, which must not block: true while requests must stay unanswered.
  bool hangs() const { return hanging_; }

  ssize_t read(int, std::byte* at, std::size_t bytes, std::uint64_t offset) noexcept override {
    const ssize_t moved = move(false, bytes, offset);
    if (moved <= 0) return moved;
    std::memcpy(at, bytes_.data() + offset, static_cast<std::size_t>(moved));
    after_read(at, static_cast<std::size_t>(moved));
    return moved;
  }
  ssize_t write(int, const std::byte* at, std::size_t bytes,
                std::uint64_t offset) noexcept override {
    const ssize_t moved = move(true, bytes, offset);
    if (moved > 0) std::memcpy(bytes_.data() + offset, at, static_cast<std::size_t>(moved));
    return moved;
  }
  int allocate(int, std::uint64_t) noexcept override { return 0; }

 private:
  ssize_t move(bool write, std::size_t bytes, std::uint64_t offset) {
    std::unique_lock hold{state_};
    const Asked asked{++asked_, write, offset, bytes};
    released_.wait(hold, [&] { return !hanging_; });
    const ssize_t answer = fault(asked);
    if (answer != kPass) return std::min(answer, static_cast<ssize_t>(bytes));
    const std::size_t end = std::max<std::size_t>(bytes_.size(), offset);
    return static_cast<ssize_t>(std::min(bytes, end - offset));
  }

  mutable std::mutex state_;
  std::condition_variable released_;
  std::atomic<bool> hanging_{false};
  std::atomic<int> asked_{0};
  std::vector<std::byte> bytes_;
};

// Answers in reverse order: last pushed, first answered.
class FakeRing final : public Ring {
 public:
  explicit FakeRing(FakeDisk& disk) : disk_{disk} {}

  std::atomic<int> enter_error{0};  // result of enter() from now on, if not 0
  int refuse_buffers = 0;
  std::atomic<int> fixed{0};  // submissions that used a registered buffer

  void push(const Submission& submission) noexcept override { pushed_.push_back(submission); }
  int enter(bool wait) noexcept override {
    if (enter_error != 0) return -enter_error;
    if (!disk_.hangs()) answer_all();
    std::unique_lock hold{state_};
    while (wait && answers_.empty() && !woken_) woken_changed_.wait(hold);
    woken_ = false;
    return 0;
  }
  bool pop(Completion& completion) noexcept override {
    if (answers_.empty()) return false;
    completion = answers_.front();
    answers_.pop_front();
    return true;
  }
  void wake() noexcept override {
    {
      const std::lock_guard hold{state_};
      woken_ = true;
    }
    woken_changed_.notify_all();
  }
  int register_buffer(unsigned, std::byte*, std::size_t) noexcept override {
    return refuse_buffers;
  }

 private:
  void answer_all() {
    while (!pushed_.empty()) {
      const Submission s = pushed_.back();
      pushed_.pop_back();
      if (s.buffer >= 0) ++fixed;
      answers_.push_back({s.tag, s.op == Op::read ? disk_.read(0, s.at, s.bytes, s.offset)
                                                  : disk_.write(0, s.at, s.bytes, s.offset)});
    }
  }

  FakeDisk& disk_;
  std::vector<Submission> pushed_;
  std::deque<Completion> answers_;
  std::mutex state_;  // guards woken_
  std::condition_variable woken_changed_;
  bool woken_ = false;
};

}  // namespace penstock
