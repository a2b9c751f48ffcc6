#include "sweep.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

namespace penstock {

namespace baseline {
extern const SweepKernels sweep_kernels;
}
#ifdef PENSTOCK_X86
namespace avx2 {
extern const SweepKernels sweep_kernels;
}
namespace avx512 {
extern const SweepKernels sweep_kernels;
}
#endif

namespace {

const SweepKernels& kernels_for(Isa isa) {
  const std::vector<Isa> usable = usable_isas();
  if (std::find(usable.begin(), usable.end(), isa) == usable.end()) {
    throw std::invalid_argument{std::string{"this processor has no "} + name_of(isa)};
  }
#ifdef PENSTOCK_X86
  if (isa == Isa::avx512) return avx512::sweep_kernels;
  if (isa == Isa::avx2) return avx2::sweep_kernels;
#endif
  return baseline::sweep_kernels;
}

std::size_t blocks_of(std::size_t count) { return (count + kSweepBlock - 1) / kSweepBlock; }

std::vector<std::size_t> lay_blocks(const std::vector<Segment>& segments) {
  std::vector<std::size_t> first{0};
  for (const Segment& segment : segments) first.push_back(first.back() + blocks_of(segment.count));
  return first;
}

std::size_t count_blocks(const std::vector<Segment>& segments) {
  return lay_blocks(segments).back();
}

constexpr std::uint32_t kInfinity = 0x7F800000;

template <class T>
const T* at(const void* base, std::size_t index) noexcept {
  return static_cast<const T*>(base) + index;
}

template <class T>
T* at(void* base, std::size_t index) noexcept {
  return static_cast<T*>(base) + index;
}

const void* grad_at(const void* base, GradType type, std::size_t index) noexcept {
  if (type == GradType::fp32) return at<float>(base, index);
  return at<std::uint16_t>(base, index);
}

bool is_finite(const void* grad, GradType type, std::size_t i) noexcept {
  switch (type) {
    case GradType::bf16:
      return (*at<std::uint16_t>(grad, i) & 0x7F80) != 0x7F80;
    case GradType::fp16:
      return (*at<std::uint16_t>(grad, i) & 0x7C00) != 0x7C00;
    case GradType::fp32:
      return std::isfinite(*at<float>(grad, i));
  }
  return true;
}

}  // namespace

void ExactSum::add(double nonnegative) noexcept {
  constexpr int kLowest =
      352;  // position of the last bit of the smallest square, 2^-298, as a double
  if (nonnegative == 0) return;
  const auto bits = std::bit_cast<std::uint64_t>(nonnegative);
  const std::uint64_t mantissa = (bits & 0xFFFFFFFFFFFFF) | 0x10000000000000;
  const int shift = static_cast<int>(bits >> 52) - 1075 + kLowest;
  // Shifted left by up to 31 bits, a 53-bit mantissa spans three limbs.
  const std::uint64_t low = (mantissa & 0xFFFFFFFF) << (shift % 32);
  const std::uint64_t high = (mantissa >> 32) << (shift % 32);
  const auto limb = static_cast<std::size_t>(shift / 32);
  limbs_[limb] += static_cast<std::int64_t>(low & 0xFFFFFFFF);
  limbs_[limb + 1] += static_cast<std::int64_t>((low >> 32) + (high & 0xFFFFFFFF));
  limbs_[limb + 2] += static_cast<std::int64_t>(high >> 32);
}

void ExactSum::add(const ExactSum& other) noexcept {
  for (std::size_t i = 0; i < kLimbs; ++i) limbs_[i] += other.limbs_[i];
}

SegmentJob::SegmentJob(std::vector<Segment> segments, GradType grad, Isa isa)
    : Job{count_blocks(segments)},
      segments_{std::move(segments)},
      first_blocks_{lay_blocks(segments_)},
      grad_{grad},
      kernels_{kernels_for(isa)} {}

SegmentJob::Piece SegmentJob::piece(std::size_t block) const noexcept {
  const auto after = std::upper_bound(first_blocks_.begin(), first_blocks_.end(), block);
  const auto segment = static_cast<std::size_t>(after - first_blocks_.begin()) - 1;
  const std::size_t begin = (block - first_blocks_[segment]) * kSweepBlock;
  return {segment, begin, std::min(begin + kSweepBlock, segments_[segment].count)};
}

void SegmentJob::look(const Piece& at, std::size_t begin, std::size_t end,
                      SweepResult& into) const noexcept {
  const void* grad = grad_at(segments_[at.segment].grad, grad_, begin);
  const LeafStats leaf = kernels_.stats[static_cast<std::size_t>(grad_)](grad, end - begin);
  into.max_bits = std::max(into.max_bits, leaf.max_bits);
  if (leaf.max_bits < kInfinity) return into.sum_squares.add(leaf.sum_squares);
  for (std::size_t i = begin; i < end; ++i) {
    if (is_finite(grad, grad_, i - begin)) continue;
    into.bad_grad = std::min(into.bad_grad, Spot{at.segment, i});
    return;
  }
}

void SegmentJob::work(Blocks& mine) noexcept {
  SweepResult part;
  for (Blocks::Run blocks = mine.next(); blocks.begin < blocks.end; blocks = mine.next()) {
    for (std::size_t i = blocks.begin; i < blocks.end; ++i) run(piece(i), part);
  }
  if (mine.taken() > 0) merge(part);
}

void SegmentJob::merge(const SweepResult& part) noexcept {
  const std::lock_guard hold{lock_};
  result_.sum_squares.add(part.sum_squares);
  result_.max_bits = std::max(result_.max_bits, part.max_bits);
  result_.bad_grad = std::min(result_.bad_grad, part.bad_grad);
  result_.bad_master = std::min(result_.bad_master, part.bad_master);
}

void StatsJob::run(const Piece& here, SweepResult& into) noexcept {
  for (std::size_t i = here.begin; i < here.end; i += kLeaf) {
    look(here, i, std::min(i + kLeaf, here.end), into);
  }
}

void MixJob::run(const Piece& here, SweepResult&) noexcept {
  const Segment& on = segment(here.segment);
  for (std::size_t i = here.begin; i < here.end; i += kTile) {
    kernels().mix(at<std::uint16_t>(on.grad, i), at<std::uint16_t>(on.weight, i),
                  at<std::int16_t>(on.rest, i), at<std::uint32_t>(on.first, i),
                  at<std::uint32_t>(on.second, i), std::min(kTile, here.end - i));
  }
}

}  // namespace penstock
