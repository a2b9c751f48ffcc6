#include "transfer.h"

#include <algorithm>
#include <cerrno>

#include "crc32c.h"

namespace penstock {
namespace {

// Errors that NVMe and SCSI drives report for failed sectors and links. ENODATA is NVMe's
// "unrecovered read error", EILSEQ a mismatch of its protection information.
bool is_media_error(int error) {
  switch (error) {
    case EIO:
    case ENODATA:
    case EILSEQ:
    case EREMOTEIO:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

Next fail(const Request& request, int error) {
  const Piece& piece = request.piece;
  request.transfer->fail(
      {error, piece.file, request.offset(), piece.place + request.moved, request.bytes()});
  return Next::failed;
}

Next retry_media(Request& request, int error, const Retries& retries) {
  return ++request.tries <= retries.media ? Next::again : fail(request, error);
}

Next retry_stalled(Request& request, int error, const Retries& retries) {
  return ++request.stalls <= retries.stalled ? Next::again : fail(request, error);
}

// Checks the checksums of a complete read, in the caller's buffer, so that the whole way from the
// disk is covered. A flipped bit may come from the link and be gone on a second attempt.
Next check_whole(Request& request, const Retries& retries) {
  const Transfer& transfer = *request.transfer;
  if (transfer.op == Op::write || !transfer.checksums) return Next::finished;
  const Piece& piece = request.piece;
  std::uint64_t wrong = 0;
  const int error = transfer.checksums->check(piece.at, piece.bytes, piece.place, wrong);
  if (error == 0) return Next::finished;
  const auto into = static_cast<std::size_t>(wrong - piece.place);
  request.moved = into;  // only for the report, if this was the last attempt
  const Next next =
      error == kBadChecksum ? retry_media(request, error, retries) : fail(request, error);
  request.moved = 0;
  return next;
}

// Returns the checksum, but never 0, which stands for a unit that was never written.
std::uint32_t checksum_of(const std::byte* at, std::size_t bytes) {
  const std::uint32_t crc = crc32c(at, bytes);
  return crc != 0 ? crc : 1;
}

}  // namespace

Checksums::Checksums(std::uint64_t bytes, std::size_t unit)
    : bytes_{bytes}, unit_{unit}, units_((bytes + unit - 1) / unit) {}

void Checksums::note(const std::byte* at, std::size_t bytes, std::uint64_t place) noexcept {
  for (std::size_t done = 0; done < bytes; done += unit_) {
    const std::uint32_t crc = checksum_of(at + done, std::min(unit_, bytes - done));
    units_[(place + done) / unit_].store(crc, std::memory_order_release);
  }
}

void Checksums::note_zeros() {
  const std::vector<std::byte> zeros(unit_);
  const std::uint32_t whole = checksum_of(zeros.data(), unit_);
  for (auto& unit : units_) unit.store(whole, std::memory_order_release);
  if (const std::size_t rest = bytes_ % unit_; rest != 0) {
    units_.back().store(checksum_of(zeros.data(), rest), std::memory_order_release);
  }
}

int Checksums::check(const std::byte* at, std::size_t bytes, std::uint64_t place,
                     std::uint64_t& wrong) const noexcept {
  for (std::size_t done = 0; done < bytes; done += unit_) {
    const std::uint32_t kept = units_[(place + done) / unit_].load(std::memory_order_acquire);
    wrong = place + done;
    if (kept == 0) return kNeverWritten;
    if (kept != checksum_of(at + done, std::min(unit_, bytes - done))) return kBadChecksum;
  }
  return 0;
}

Failure Transfer::failure() const {
  const std::lock_guard hold{state_};
  return failure_;
}

void Transfer::fail(const Failure& failure) {
  const std::lock_guard hold{state_};
  if (failure_.error == 0) failure_ = failure;
}

Next settle(Request& request, ssize_t answer, std::size_t align, const Retries& retries) {
  if (answer == -EINTR || answer == -EAGAIN) {
    return retry_stalled(request, static_cast<int>(-answer), retries);
  }
  if (answer < 0) {
    const int error = static_cast<int>(-answer);
    return is_media_error(error) ? retry_media(request, error, retries) : fail(request, error);
  }
  const auto moved = std::min(static_cast<std::size_t>(answer), request.bytes());
  if (moved == request.bytes()) return check_whole(request, retries);
  if (moved == 0 && request.transfer->op == Op::read) return fail(request, kEndOfFile);
  // The rest must start on a block boundary, or O_DIRECT refuses it. Bytes before that position
  // move twice, which is harmless.
  const std::size_t reached = (request.moved + moved) / align * align;
  if (reached <=
      request.moved) {  // a read that keeps stopping inside a block is at the end of the file
    return retry_stalled(request, request.transfer->op == Op::read ? kEndOfFile : EIO, retries);
  }
  request.moved = reached;
  return Next::again;
}

std::size_t count_requests(std::span<const Piece> pieces, std::size_t bytes) noexcept {
  std::size_t count = 0;
  for (const Piece& piece : pieces) count += (piece.bytes + bytes - 1) / bytes;
  return count;
}

std::vector<Request> cut(const std::shared_ptr<Transfer>& transfer, std::span<const Piece> pieces,
                         std::size_t bytes) {
  std::vector<Request> requests;
  requests.reserve(count_requests(pieces, bytes));
  for (const Piece& piece : pieces) {
    for (std::size_t done = 0; done < piece.bytes; done += bytes) {
      requests.push_back({transfer,
                          {piece.file, piece.offset + done, piece.at + done,
                           std::min(bytes, piece.bytes - done), piece.place + done}});
    }
  }
  return requests;
}

}  // namespace penstock
