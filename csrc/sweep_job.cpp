// The optimizer step: tile by tile, decode the moments, apply the rule, encode the moments.
#include <algorithm>

#include "sweep.h"

namespace penstock {
namespace {

// On the stack of the thread, so that they stay in its caches.
struct Buffers {
  alignas(64) float first[kTile];
  alignas(64) float second[kTile];
  alignas(64) std::uint32_t random[kTile];
};

std::size_t grad_bytes(GradType type) noexcept { return type == GradType::fp32 ? 4 : 2; }
std::size_t weight_bytes(MasterType type) noexcept { return type == MasterType::single ? 4 : 2; }
std::size_t rest_bytes(MasterType type) noexcept {
  return type == MasterType::split ? 2 : type == MasterType::half ? 4 : 0;
}
std::size_t moment_bytes(MomentType type) noexcept {
  return type == MomentType::fp32 ? 4 : type == MomentType::bf16 ? 2 : 1;
}

template <class T>
T* plus(T* base, std::size_t bytes) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Byte*>(base) + bytes;
}

struct Moment {
  void* stored;
  std::int16_t* bases;
};

Moment moment_at(void* stored, std::int16_t* bases, MomentType type, std::size_t begin) noexcept {
  if (stored == nullptr) return {nullptr, nullptr};
  return {plus(stored, begin * moment_bytes(type)),
          bases == nullptr ? nullptr : bases + begin / kMomentBlock};
}

// fp32 moments are updated in place.
float* read(const SweepKernels& k, const Moment& moment, MomentType type, std::size_t count,
            SweepKernels::Decode8 decode, float* buffer) noexcept {
  if (type == MomentType::fp32) return static_cast<float*>(moment.stored);
  if (type == MomentType::bf16) {
    k.widen(static_cast<const std::uint16_t*>(moment.stored), buffer, count);
  } else if (type == MomentType::int8) {
    decode(moment.stored, moment.bases, buffer, count);
  } else {
    std::fill_n(buffer, count, 0.0F);
  }
  return buffer;
}

SweepKernels::Step step_of(const SweepKernels& k, const SweepFormat& format) noexcept {
  const auto grad = static_cast<std::size_t>(format.grad);
  const auto master = static_cast<std::size_t>(format.master);
  switch (format.part) {
    case Part::all:
      break;
    case Part::weights:
      return k.weights[grad][master];
    case Part::moments:
      return k.moments[grad];
    case Part::checked:
      return k.checked[grad][master];
  }
  return k.step[static_cast<std::size_t>(format.rule)][grad][master];
}

}  // namespace

SweepJob::SweepJob(std::vector<Segment> segments, SweepFormat format, bool stats, Isa isa)
    : SegmentJob{std::move(segments), format.grad, isa}, format_{format}, stats_{stats} {}

void SweepJob::run(const Piece& here, SweepResult& into) noexcept {
  for (std::size_t leaf = here.begin; leaf < here.end; leaf += kLeaf) {
    const std::size_t end = std::min(leaf + kLeaf, here.end);
    // Compute the norm before the step, leaf by leaf: the step then finds the gradient in the
    // cache.
    if (stats_) look(here, leaf, end, into);
    for (std::size_t i = leaf; i < end; i += kTile) {
      const std::size_t count = std::min(kTile, end - i);
      const std::size_t bad = step_tile(segment(here.segment), i, count);
      if (bad < count) into.bad_master = std::min(into.bad_master, Spot{here.segment, i + bad});
    }
  }
}

std::size_t SweepJob::step_tile(const Segment& on, std::size_t begin,
                                std::size_t count) const noexcept {
  const SweepKernels& k = kernels();
  const auto [rule, grad, master, moments, part] = format_;
  const bool two = k.two_moments[static_cast<std::size_t>(rule)];
  const Moment first = moment_at(on.first, on.first_bases, moments, begin);
  const Moment second = moment_at(on.second, on.second_bases, moments, begin);
  Buffers buffers;
  float* m = read(k, first, moments, count, k.decode_first, buffers.first);
  float* v = two ? read(k, second, moments, count, k.decode_second, buffers.second) : nullptr;
  // A pass over the moments has no use for the masters, which somebody may read meanwhile.
  const bool masters = part != Part::moments;
  const std::size_t bad = step_of(k, format_)(
      {plus(on.grad, begin * grad_bytes(grad)),
       masters ? plus(on.weight, begin * weight_bytes(master)) : nullptr,
       masters ? plus(on.rest, begin * rest_bytes(master)) : nullptr, m, v, count},
      on.by);
  if (part == Part::weights) return bad;
  if (moments == MomentType::bf16 || moments == MomentType::int8) {
    k.draw({on.key, on.first_index + begin}, buffers.random, count);
  }
  if (moments == MomentType::bf16) {
    k.round(m, static_cast<std::uint16_t*>(first.stored), count, buffers.random, 16);
    if (two) k.round(v, static_cast<std::uint16_t*>(second.stored), count, buffers.random, 0);
  } else if (moments == MomentType::int8) {
    k.encode_first(m, first.stored, first.bases, count, buffers.random);
    if (two) k.encode_second(v, second.stored, second.bases, count, buffers.random);
  }
  return bad;
}

std::optional<Overlap> find_overlap(const std::vector<Segment>& segments, SweepFormat format) {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    std::size_t segment;
    const char* role;
    bool written;
  };
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& on = segments[i];
    const auto note = [&](const void* at, std::size_t bytes, const char* role, bool written) {
      const auto* begin = static_cast<const std::byte*>(at);
      if (begin != nullptr && bytes > 0) ranges.push_back({begin, begin + bytes, i, role, written});
    };
    const std::size_t bases = (on.count + kMomentBlock - 1) / kMomentBlock * sizeof(std::int16_t);
    note(on.grad, on.count * grad_bytes(format.grad), "grad", false);
    note(on.weight, on.count * weight_bytes(format.master), "weight", true);
    note(on.rest, on.count * rest_bytes(format.master), "rest", true);
    note(on.first, on.count * moment_bytes(format.moments), "first moment", true);
    note(on.second, on.count * moment_bytes(format.moments), "second moment", true);
    note(on.first_bases, bases, "first moment's bases", true);
    note(on.second_bases, bases, "second moment's bases", true);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // The range with the highest end so far, and the written range with the highest end.
  const Range* far = nullptr;
  const Range* written = nullptr;
  for (const Range& next : ranges) {
    const Range* hit = next.written ? far : written;
    if (hit != nullptr && next.begin < hit->end) {
      return Overlap{hit->segment, next.segment, hit->role, next.role};
    }
    if (far == nullptr || far->end < next.end) far = &next;
    if (next.written && (written == nullptr || written->end < next.end)) written = &next;
  }
  return std::nullopt;
}

}  // namespace penstock
