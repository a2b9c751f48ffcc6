// Compiled once per instruction set. Nothing here may use an inline function of another header: the
// linker keeps one copy of such a function for the whole program, which could be the one compiled
// for AVX-512, and would crash on a processor without it.
#include "sweep_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock::PENSTOCK_ISA {
namespace {

// In this order: each uses what the one before it has.
// clang-format off
#include "sweep_vec.h"
#include "sweep_math.h"
#include "sweep_rules.h"
#include "sweep_norm.h"
// clang-format on

// Elements beyond 2^32 of a tensor use other keys. A tile never crosses that boundary, because it
// is aligned.
void draw(Draw at, std::uint32_t* __restrict random, std::size_t count) noexcept {
  const auto index = static_cast<std::uint32_t>(at.index);
  const auto high = static_cast<std::uint32_t>(at.index >> 32);
  const std::uint32_t key0 = static_cast<std::uint32_t>(at.key) ^ (high * 0x9E3779B1);
  const auto key1 = static_cast<std::uint32_t>(at.key >> 32);
  for (std::size_t i = 0; i < count; ++i) {
    random[i] = draw_bits(index + static_cast<std::uint32_t>(i), key0, key1);
  }
}

void widen_all(const std::uint16_t* __restrict bf16, float* __restrict to,
               std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) to[i] = from_bf16(bf16[i]);
}

void round(const float* __restrict from, std::uint16_t* __restrict bf16, std::size_t count,
           const std::uint32_t* __restrict random, unsigned shift) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(from[i]);
    const std::uint32_t draw = (random[i] >> shift) & 0xFFFF;
    const std::uint32_t top = least(((bits & kMagnitude) + draw) >> 16, 0x7F7F);
    bf16[i] = static_cast<std::uint16_t>((bits & kSign) >> 16 | top);
  }
}

// 8-bit moments. Both encoders pass over a block twice: first they round to the grid and find the
// largest element, then they compute the codes relative to it.

void decode_first(const void* codes, const std::int16_t* bases, float* __restrict to,
                  std::size_t count) noexcept {
  const auto* __restrict code = static_cast<const std::uint8_t*>(codes);
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t end = count - at < kMomentBlock ? count : at + kMomentBlock;
    const auto base = static_cast<std::uint32_t>(bases[at / kMomentBlock]);
    for (std::size_t i = at; i < end; ++i) {
      const std::uint32_t size = code[i] & 0x7F;
      const std::uint32_t magnitude = size == 0 ? 0 : (size + base) << kGridShift;
      to[i] = float_of(magnitude | (std::uint32_t{code[i]} & 0x80) << 24);
    }
  }
}

void decode_second(const void* codes, const std::int16_t* bases, float* __restrict to,
                   std::size_t count) noexcept {
  const auto* __restrict code = static_cast<const std::uint8_t*>(codes);
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t end = count - at < kMomentBlock ? count : at + kMomentBlock;
    const auto base = static_cast<std::uint32_t>(bases[at / kMomentBlock]);
    for (std::size_t i = at; i < end; ++i) {
      const std::uint32_t size = code[i];
      to[i] = float_of(size == 0 ? 0 : (size + base) << kGridShift);
    }
  }
}

// Returns the largest grid position in the block.
std::uint32_t grid_block(const float* __restrict from, std::size_t count,
                         const std::uint32_t* __restrict random, unsigned shift,
                         std::uint32_t* __restrict place) {
  std::uint32_t top = 0;
  for (std::size_t i = 0; i < count; ++i) {
    place[i] = onto_grid(bits_of(from[i]) & kMagnitude, (random[i] >> shift) & 0xFFFF);
    top = most(top, place[i]);
  }
  return top;
}

// Values below the block's range become its lowest value or zero, with probabilities that preserve
// the mean.
void encode_first(const float* __restrict from, void* codes, std::int16_t* bases, std::size_t count,
                  const std::uint32_t* __restrict random) noexcept {
  auto* __restrict code = static_cast<std::uint8_t*>(codes);
  std::uint32_t place[kMomentBlock];
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t length = count - at < kMomentBlock ? count - at : kMomentBlock;
    const std::uint32_t top = grid_block(from + at, length, random + at, 16, place);
    const std::uint32_t base = top > 127 ? top - 127 : 0;
    const float unit = float_of((base + 1) << kGridShift) * 0x1p-16F;
    bases[at / kMomentBlock] = static_cast<std::int16_t>(base);
    for (std::size_t i = 0; i < length; ++i) {
      const std::uint32_t bits = bits_of(from[at + i]);
      const float dart = static_cast<float>(static_cast<std::int32_t>(random[at + i] >> 16));
      const std::uint32_t low = float_of(bits & kMagnitude) > dart * unit ? 1 : 0;
      const std::uint32_t size = place[i] > base ? place[i] - base : low;
      code[at + i] = static_cast<std::uint8_t>((bits & kSign) >> 24 | size);
    }
  }
}

// Values below the block's range become its lowest value, never zero: a second moment of zero where
// the exact one is not zero would make the step divide by eps alone.
void encode_second(const float* __restrict from, void* codes, std::int16_t* bases,
                   std::size_t count, const std::uint32_t* __restrict random) noexcept {
  auto* __restrict code = static_cast<std::uint8_t*>(codes);
  std::uint32_t place[kMomentBlock];
  for (std::size_t at = 0; at < count; at += kMomentBlock) {
    const std::size_t length = count - at < kMomentBlock ? count - at : kMomentBlock;
    const std::uint32_t top = grid_block(from + at, length, random + at, 0, place);
    const std::uint32_t base = top > 255 ? top - 255 : 0;
    bases[at / kMomentBlock] = static_cast<std::int16_t>(base);
    for (std::size_t i = 0; i < length; ++i) {
      const std::uint32_t size = place[i] > base ? place[i] - base : 1;
      code[at + i] = static_cast<std::uint8_t>(bits_of(from[at + i]) == 0 ? 0 : size);
    }
  }
}

void mix(const std::uint16_t* __restrict grad, std::uint16_t* __restrict weight,
         std::int16_t* __restrict rest, std::uint32_t* __restrict first,
         std::uint32_t* __restrict second, std::size_t count) noexcept {
  for (std::size_t at = 0; at < count; at += kLanes) {
    const std::size_t end = count - at < kLanes ? count : at + kLanes;
    prefetch(grad + at, kLanes);
    prefetch(weight + at, kLanes);
    prefetch(rest + at, kLanes);
    prefetch(first + at, kLanes);
    prefetch(second + at, kLanes);
    for (std::size_t i = at; i < end; ++i) {
      const std::uint16_t g = grad[i];
      weight[i] = static_cast<std::uint16_t>(weight[i] ^ g);
      rest[i] = static_cast<std::int16_t>(rest[i] ^ g);
      first[i] ^= g;
      second[i] ^= g;
    }
  }
}

}  // namespace

#define PENSTOCK_STEPS(rule, grad, part)                                                \
  {step_tile<rule, grad, SplitMaster, part>, step_tile<rule, grad, SingleMaster, part>, \
   step_tile<rule, grad, HalfMaster, part>}
#define PENSTOCK_RULE(rule, part)                                              \
  {PENSTOCK_STEPS(rule, Bf16Grad, part), PENSTOCK_STEPS(rule, Fp16Grad, part), \
   PENSTOCK_STEPS(rule, Fp32Grad, part)}

extern const SweepKernels sweep_kernels;
const SweepKernels sweep_kernels{
    {PENSTOCK_RULE(AdamWRule, Part::all), PENSTOCK_RULE(SgdRule, Part::all),
     PENSTOCK_RULE(LionRule, Part::all)},
    PENSTOCK_RULE(AdamWRule, Part::weights),
    // The master is not used, so its type does not matter.
    {step_tile<AdamWRule, Bf16Grad, SplitMaster, Part::moments>,
     step_tile<AdamWRule, Fp16Grad, SplitMaster, Part::moments>,
     step_tile<AdamWRule, Fp32Grad, SplitMaster, Part::moments>},
    PENSTOCK_RULE(AdamWRule, Part::checked),
    {AdamWRule::kTwoMoments, SgdRule::kTwoMoments, LionRule::kTwoMoments},
    {stats_of<Bf16Grad>, stats_of<Fp16Grad>, stats_of<Fp32Grad>},
    draw,
    widen_all,
    round,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    mix,
};

}  // namespace penstock::PENSTOCK_ISA
