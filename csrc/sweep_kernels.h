// The kernels that each instruction set provides for the sweep: decode a tile, update it, encode
// it.
//
// A tile has at most kTile consecutive elements of one tensor. A rule's loop reads gradient and
// master as they are stored. Compressed moments are converted to fp32 before the loop and back
// after it, in buffers that stay in the first-level cache. docs/sweep.md describes the arithmetic,
// and penstock/optim/reference.py is the same in torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

inline constexpr std::size_t kTile = 1024;         // elements updated at a time, in the L1 cache
inline constexpr std::size_t kLeaf = 4096;         // elements per partial sum of squares
inline constexpr std::size_t kLanes = 32;          // number of running sums in a leaf
inline constexpr std::size_t kMomentBlock = 256;   // elements per base of 8-bit moments
inline constexpr std::size_t kSweepBlock = 16384;  // elements a thread takes at a time

// The constants of a parameter group for one step, computed in double by the caller and rounded
// once.
struct Coefficients {
  float scale = 1;   // factor for the gradient as read: unscale x clip, negative to maximize
  float l2 = 0;      // weight decay added to the gradient
  float decay = 0;   // lr x weight decay, subtracted from the master
  float rate = 0;    // lr; for AdamW including both bias corrections
  float fresh1 = 1;  // weight of the new gradient in the first moment: 1 - beta1
  float fresh2 = 1;  // AdamW: second moment; Lion: moment (fresh1: sign)
  float eps = 0;     // AdamW: including the second bias correction
  float keep = 0;    // SGD: momentum
  float look = 0;    // SGD: 1 for Nesterov momentum, else 0
};

// Which results of a step are written. Weights and moments can be updated in two passes over the
// same gradient: Part::weights, then Part::moments, give the bits of Part::all. A pass over the
// moments does not read the masters, so it does not know which elements were refused. Where there
// are any, Part::checked finds them as the first pass did: they have kept their master. (It would
// also find an element whose master, near the largest float, overflows only the second time.)
enum class Part { all, weights, moments, checked };

// Position of a tile in the random numbers of stochastic rounding. It does not depend on threads or
// chunks.
struct Draw {
  std::uint64_t key = 0;    // derived from seed, step and tensor
  std::uint64_t index = 0;  // index of the tile's first element in its tensor
};

// Consecutive elements of one tensor: gradient and master as stored, moments as fp32.
struct Tile {
  const void* grad;
  void* weight;
  void* rest;
  float* first;
  float* second;
  std::size_t count;
};

struct LeafStats {
  double sum_squares = 0;
  std::uint32_t max_bits = 0;  // bits of the largest absolute value; NaN above infinity
};

inline constexpr std::size_t kRules = 3;    // in the order of Rule
inline constexpr std::size_t kGrads = 3;    // in the order of GradType
inline constexpr std::size_t kMasters = 3;  // in the order of MasterType

struct SweepKernels {
  // Runs a step in place. Returns the index of the first element whose new weight would not be
  // finite, or `count`. Such elements keep their master and moments.
  using Step = std::size_t (*)(const Tile& on, const Coefficients& by) noexcept;
  using Stats = LeafStats (*)(const void* grad, std::size_t count) noexcept;
  // The first moment is rounded with the upper halves of the random words, the second with the
  // lower halves.
  using Encode8 = void (*)(const float* from, void* codes, std::int16_t* bases, std::size_t count,
                           const std::uint32_t* random) noexcept;
  using Decode8 = void (*)(const void* codes, const std::int16_t* bases, float* to,
                           std::size_t count) noexcept;

  Step step[kRules][kGrads][kMasters];
  // AdamW in two passes (see Part). Other rules may add the master to the gradient, which the
  // second pass would find changed.
  Step weights[kGrads][kMasters];
  Step moments[kGrads];
  Step checked[kGrads][kMasters];
  bool two_moments[kRules];  // whether a rule has a second moment
  Stats stats[kGrads];
  void (*draw)(Draw at, std::uint32_t* random, std::size_t count) noexcept;
  void (*widen)(const std::uint16_t* bf16, float* to, std::size_t count) noexcept;
  void (*round)(const float* from, std::uint16_t* bf16, std::size_t count,
                const std::uint32_t* random, unsigned shift) noexcept;
  Decode8 decode_first, decode_second;
  Encode8 encode_first, encode_second;
  // The exact format's reads and writes with almost no arithmetic: the upper bound set by memory.
  // `rest` is the low half of the master. Two calls in a row restore the original bytes.
  void (*mix)(const std::uint16_t* grad, std::uint16_t* weight, std::int16_t* rest,
              std::uint32_t* first, std::uint32_t* second, std::size_t count) noexcept;
};

}  // namespace penstock
