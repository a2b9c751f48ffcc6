// The engine for kernels and containers without io_uring, with one thread per request in flight.
#include <algorithm>

#include "engine.h"

namespace penstock {
namespace {

void serve(Queue& queue, Queue::Slot& slot, Disk& disk) {
  while (queue.take(slot)) {
    const Request& request = slot.request;
    const Transfer& transfer = *request.transfer;
    if (transfer.op == Op::write && transfer.checksums) {
      transfer.checksums->note(request.piece.at, request.piece.bytes, request.piece.place);
    }
    slot.with_kernel = true;
    const bool reads = transfer.op == Op::read;
    ssize_t answer;
    do {
      const int fd = queue.options.files[request.piece.file];
      answer = reads ? disk.read(fd, request.at(), request.bytes(), request.offset())
                     : disk.write(fd, request.at(), request.bytes(), request.offset());
    } while (queue.answer(slot, answer));
  }
}

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(const EngineOptions& options, Disk& disk) : Engine{options, options.depth} {
    for (unsigned i = 0; i < queue_->options.depth; ++i) {
      launch([i, &disk](Queue& queue) { serve(queue, queue.slot(i), disk); });
    }
  }
  ~ThreadEngine() override { close(kLastChance); }
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(EngineOptions options, Disk& disk) {
  options.depth = std::max(1U, options.depth);
  return std::make_unique<ThreadEngine>(std::move(options), disk);
}

}  // namespace penstock
