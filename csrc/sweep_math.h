// The arithmetic, for sweep_kernels.cpp only: included inside its namespace, so that each
// instruction set has its own copy (see the note there). Every instruction set gives the same bits:
// each operation is rounded once (IEEE, no contraction), and conversions are integer arithmetic.

constexpr std::uint32_t kSign = 0x80000000;
constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline std::uint32_t least(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
inline std::uint32_t most(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

inline float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

// Rebases the exponent of a half by a multiplication, which is exact and handles denormals
// correctly. For words and for vectors of words.
template <class Bits>
inline Bits widen_fp16(Bits half) {
  const Bits shifted = (half & 0x7FFF) << 13;
  const Bits finite = bits_of(float_of(shifted) * 0x1p112F);
  const Bits magnitude = shifted >= 0x0F800000 ? (shifted | 0x7F800000) : finite;
  return magnitude | (half & 0x8000) << 16;
}
inline float from_fp16(std::uint16_t x) { return float_of(widen_fp16(std::uint32_t{x})); }

inline Floats from_bf16(Halves x) { return float_of(widen(x) << 16); }
inline Floats from_fp16(Halves x) { return float_of(widen_fp16(widen(x))); }

// Rounds to nearest, ties to even, for finite results. Denormal halves are aligned by adding 0.5,
// whose last bit has the same weight as theirs, so that the addition itself rounds.
inline Halves to_fp16(Floats x) {
  const Words magnitude = bits_of(x) & kMagnitude;
  const Words odd = (magnitude >> 13) & 1;
  const Words normal = (magnitude - 0x38000000 + 0xFFF + odd) >> 13;
  const Words denormal = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000;
  const Words finite = magnitude < 0x38800000 ? denormal : normal;
  return narrow((bits_of(x) & kSign) >> 16 | finite);
}

// The gradient as every rule uses it. A gradient whose square does not fit fp32 is clamped to the
// largest one whose square does. With torch, the second moment becomes infinite there and the
// weight never changes again.
constexpr float kGradLimit = 0x1.fffffep+63F;

inline Floats gradient(Floats raw, Floats master, const Coefficients& by) {
  const Floats scaled = raw * by.scale;
  const Floats g = by.l2 == 0 ? scaled : scaled + by.l2 * master;
  return at_least(all(-kGradLimit), at_most(all(kGradLimit), g));
}

// Blends old and new values, rounding their difference once. In a steady state this is exact, while
// old * beta + new * (1 - beta) drifts, because the two rounded factors do not add up to one.
inline Floats blend(Floats old, Floats fresh, float share) { return old + share * (fresh - old); }

// Returns 32 random bits for an element: a bijection of its index, with a key before and after.
inline std::uint32_t draw_bits(std::uint32_t index, std::uint32_t key0, std::uint32_t key1) {
  std::uint32_t x = index ^ key0;
  x = (x ^ (x >> 16)) * 0x7FEB352D;
  x = ((x ^ (x >> 15)) + key1) * 0x846CA68B;
  return x ^ (x >> 16);
}

// The 8-bit moments are on one grid, which is the same for all blocks: floats with three bits of
// mantissa, numbered by their leading bits. The base of a block selects the range of the grid that
// its codes cover.
constexpr int kGridShift = 20;
constexpr std::uint32_t kGridTop = 0x7F7;  // the largest finite position

// Rounds a magnitude up or down the grid with probabilities that preserve the mean, using 16 random
// bits.
inline std::uint32_t onto_grid(std::uint32_t magnitude, std::uint32_t random) {
  return least((magnitude + (random << (kGridShift - 16))) >> kGridShift, kGridTop);
}
