// Norm and overflow check of a leaf in one read, for sweep_kernels.cpp only (see sweep_math.h). The
// order of additions is part of the format: docs/sweep.md defines it, and the GPU kernels use the
// same order.

constexpr std::size_t kRows = 4;  // rows of kLanes elements whose squares are added in fp32

// Adds the upper half of the lanes to the lower half until one lane is left.
template <std::size_t count>
inline double fold(double* lanes) {
  for (std::size_t j = 0; j < count / 2; ++j) lanes[j] += lanes[j + count / 2];
  if constexpr (count > 2) return fold<count / 2>(lanes);
  return lanes[0];
}

// Sums in fp64, in which squares of fp32 numbers are exact: lane j adds the squares of elements j,
// j + 32, and so on. A tail is padded with zeros.
template <class Grad>
LeafStats wide_leaf(const typename Grad::Stored* __restrict x, std::size_t count) {
  double sums[kLanes] = {};
  std::uint32_t tops[kLanes] = {};
  const auto add = [&](std::size_t at, std::size_t lanes) {
    for (std::size_t j = 0; j < lanes; ++j) {
      const float g = Grad::one(x[at + j]);
      sums[j] += static_cast<double>(g) * static_cast<double>(g);
      tops[j] = most(tops[j], bits_of(g) & kMagnitude);
    }
  };
  std::size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    prefetch(x + at, kLanes);
    add(at, kLanes);
  }
  add(at, count - at);
  for (std::size_t j = 1; j < kLanes; ++j) tops[0] = most(tops[0], tops[j]);
  return {fold<kLanes>(sums), tops[0]};
}

// Squares of 16-bit gradients are exact in fp32, so four rows are squared and added in fp32 before
// they are added in fp64, which is more expensive. Two neighbours share a word: even and odd lanes
// are separate.
constexpr std::size_t kWords = kLanes / 2;
constexpr std::size_t kVectors = kWords / kWide;

struct NarrowSums {
  Doubles even_low[kVectors] = {}, even_high[kVectors] = {};
  Doubles odd_low[kVectors] = {}, odd_high[kVectors] = {};
  Pairs tops[kVectors] = {};
};

template <class Grad>
inline void add_rows(const std::uint16_t* x, NarrowSums& to) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    const std::uint16_t* at = x + 2 * kWide * v;
    Floats even[kRows], odd[kRows];
    for (std::size_t row = 0; row < kRows; ++row) {
      const Words two = load<Words>(at + kLanes * row);
      to.tops[v] = larger(to.tops[v], (Pairs)(two & 0x7FFF7FFF));
      const Floats a = Grad::even(two), b = Grad::odd(two);
      even[row] = a * a;
      odd[row] = b * b;
    }
    const Floats evens = (even[0] + even[1]) + (even[2] + even[3]);
    const Floats odds = (odd[0] + odd[1]) + (odd[2] + odd[3]);
    to.even_low[v] += low_doubles(evens);
    to.even_high[v] += high_doubles(evens);
    to.odd_low[v] += low_doubles(odds);
    to.odd_high[v] += high_doubles(odds);
  }
}

inline double fold_narrow(const NarrowSums& sums) {
  double even[kWords], odd[kWords];
  for (std::size_t v = 0; v < kVectors; ++v) {
    store(even + v * kWide, sums.even_low[v]);
    store(even + v * kWide + kWide / 2, sums.even_high[v]);
    store(odd + v * kWide, sums.odd_low[v]);
    store(odd + v * kWide + kWide / 2, sums.odd_high[v]);
  }
  return fold<kWords>(even) + fold<kWords>(odd);
}

template <class Grad>
LeafStats narrow_leaf(const std::uint16_t* x, std::size_t count) {
  constexpr std::size_t kGroup = kRows * kLanes;
  NarrowSums sums;
  std::size_t at = 0;
  for (; at + kGroup <= count; at += kGroup) {
    prefetch(x + at, kGroup);
    add_rows<Grad>(x + at, sums);
  }
  if (at < count) {
    std::uint16_t rest[kGroup] = {};
    __builtin_memcpy(rest, x + at, (count - at) * sizeof *x);
    add_rows<Grad>(rest, sums);
  }
  std::int16_t tops[kLanes], top = 0;
  for (std::size_t v = 0; v < kVectors; ++v) store(tops + 2 * kWide * v, sums.tops[v]);
  for (std::size_t j = 0; j < kLanes; ++j) top = top < tops[j] ? tops[j] : top;
  return {fold_narrow(sums), bits_of(Grad::one(static_cast<std::uint16_t>(top)))};
}

// The range of fp32 is too small for squares of bf16. A leaf whose largest element is above 2^48,
// or below 2^-48 so that other squares could vanish, is summed in fp64.
constexpr std::uint32_t kNarrowLeast = 0x27800000;
constexpr std::uint32_t kNarrowMost = 0x57800000;

template <class Grad>
LeafStats stats_of(const void* grad, std::size_t count) noexcept {
  const auto* x = static_cast<const typename Grad::Stored*>(grad);
  if constexpr (sizeof(typename Grad::Stored) == 2) {
    const LeafStats found = narrow_leaf<Grad>(x, count);
    const std::uint32_t top = found.max_bits;
    if (top == 0 || (kNarrowLeast <= top && top < kNarrowMost)) return found;
  }
  return wide_leaf<Grad>(x, count);
}
