// The update rules, for sweep_kernels.cpp only (see sweep_math.h): how a gradient and a master are
// stored, the step of one element, and the loop over a tile.

struct Bf16Grad {
  using Stored = std::uint16_t;
  static float one(Stored x) { return from_bf16(x); }
  static Floats many(const Stored* at) { return from_bf16(load<Halves>(at)); }
  // The first and the second value of words that hold two. Signs may be lost, and infinities may
  // become anything: the norm uses only the squares and detects infinities separately.
  static Floats even(Words two) { return float_of(two << 16); }
  static Floats odd(Words two) { return float_of(two & 0xFFFF0000); }
};
struct Fp16Grad {
  using Stored = std::uint16_t;
  static float one(Stored x) { return from_fp16(x); }
  static Floats many(const Stored* at) { return from_fp16(load<Halves>(at)); }
  static Floats even(Words two) { return float_of((two & 0x7FFF) << 13) * 0x1p112F; }
  static Floats odd(Words two) { return float_of((two & 0x7FFF0000) >> 3) * 0x1p112F; }
};
struct Fp32Grad {
  using Stored = float;
  static float one(Stored x) { return x; }
  static Floats many(const Stored* at) { return load<Floats>(at); }
};

// kLimit contains the bits of the largest master whose weight is finite.

// A bf16 weight and the remainder to its master. Ties round away from zero, so that the remainder
// fits 16 bits.
struct SplitMaster {
  using Weight = std::uint16_t;
  using Rest = std::int16_t;
  static constexpr std::uint32_t kLimit = 0x7F7F7FFF;
  static Floats read(const Weight* weight, const Rest* rest) {
    const auto remainder = reinterpret_cast<Words>(widen(load<Shorts>(rest)));
    return float_of((widen(load<Halves>(weight)) << 16) + remainder);
  }
  static void write(Floats master, Weight* weight, Rest* rest) {
    store(weight, narrow((bits_of(master) + 0x8000) >> 16));
    store(rest, narrow(bits_of(master)));  // master - weight; only the low half matters
  }
};

struct SingleMaster {
  using Weight = float;
  using Rest = float;  // never accessed
  static constexpr std::uint32_t kLimit = 0x7F7FFFFF;
  static Floats read(const Weight* weight, const Rest*) { return load<Floats>(weight); }
  static void write(Floats master, Weight* weight, Rest*) { store(weight, master); }
};

struct HalfMaster {
  using Weight = std::uint16_t;
  using Rest = float;
  static constexpr std::uint32_t kLimit = 0x477FEFFF;
  static Floats read(const Weight*, const Rest* rest) { return load<Floats>(rest); }
  static void write(Floats master, Weight* weight, Rest* rest) {
    store(weight, to_fp16(master));
    store(rest, master);
  }
};

struct Elements {
  Floats master, first, second;
};

struct AdamWRule {
  static constexpr bool kTwoMoments = true;
  static Elements step(const Elements& old, Floats raw, const Coefficients& by) {
    const Floats g = gradient(raw, old.master, by);
    const Floats m = blend(old.first, g, by.fresh1);
    const Floats v = blend(old.second, g * g, by.fresh2);
    const Floats toward = by.rate * (m / (root(v) + by.eps));
    return {old.master - (toward + by.decay * old.master), m, v};
  }
};

struct SgdRule {
  static constexpr bool kTwoMoments = false;
  static Elements step(const Elements& old, Floats raw, const Coefficients& by) {
    const Floats g = gradient(raw, old.master, by);
    const Floats m = by.keep * old.first + by.fresh1 * g;
    const Floats toward = by.rate * (by.look == 0 ? m : g + by.keep * m);
    return {old.master - (toward + by.decay * old.master), m, Floats{}};
  }
};

struct LionRule {
  static constexpr bool kTwoMoments = false;
  static Elements step(const Elements& old, Floats raw, const Coefficients& by) {
    const Floats g = gradient(raw, old.master, by);
    const Floats lean = blend(old.first, g, by.fresh1);
    // Zero stays zero, and NaN stays NaN.
    const Floats toward = lean > 0 ? all(by.rate) : (lean < 0 ? all(-by.rate) : lean);
    return {old.master - (toward + by.decay * old.master), blend(old.first, g, by.fresh2),
            Floats{}};
  }
};

struct Kept {
  Floats master, first, second;
  std::size_t bad;  // index of the first refused element
};

// Restores refused elements. Out of line and with plain arguments, so that the vectors of the loop
// stay in registers.
[[gnu::noinline, gnu::cold]] void keep_refused(Floats old_master, Floats old_first,
                                               Floats old_second, Floats master, Floats first,
                                               Floats second, std::uint32_t limit, Kept* kept) {
  kept->bad = kWide;
  for (std::size_t i = kWide; i-- > 0;) {
    if ((bits_of(master)[i] & kMagnitude) <= limit) continue;
    master[i] = old_master[i];
    first[i] = old_first[i];
    second[i] = old_second[i];
    kept->bad = i;
  }
  kept->master = master;
  kept->first = first;
  kept->second = second;
}

template <class Rule, class Grad, class Master, Part part>
inline std::size_t step_some(const typename Grad::Stored* grad, typename Master::Weight* weight,
                             typename Master::Rest* rest, float* first, float* second,
                             const Coefficients& by) {
  if constexpr (part == Part::moments) {
    const Elements old{Floats{}, load<Floats>(first), load<Floats>(second)};
    const Elements next = Rule::step(old, Grad::many(grad), by);
    store(first, next.first);
    store(second, next.second);
    return kWide;
  }
  const Elements old{Master::read(weight, rest), load<Floats>(first),
                     Rule::kTwoMoments ? load<Floats>(second) : Floats{}};
  Elements next = Rule::step(old, Grad::many(grad), by);
  std::size_t bad = kWide;
  if (any_above(bits_of(next.master) & kMagnitude, all(Master::kLimit))) [[unlikely]] {
    Kept kept;
    keep_refused(old.master, old.first, old.second, next.master, next.first, next.second,
                 Master::kLimit, &kept);
    next = {kept.master, kept.first, kept.second};
    bad = kept.bad;
  }
  if constexpr (part != Part::checked) Master::write(next.master, weight, rest);
  if constexpr (part != Part::weights) store(first, next.first);
  if constexpr (part != Part::weights && Rule::kTwoMoments) store(second, next.second);
  return bad;
}

template <class T>
inline void copy(T* to, const T* from, std::size_t count) {
  if (from != nullptr && to != nullptr) __builtin_memcpy(to, from, count * sizeof(T));
}

// The last few elements, through a buffer of a whole vector.
template <class Rule, class Grad, class Master, Part part>
inline std::size_t step_rest(const Tile& on, std::size_t at, const Coefficients& by) {
  typename Grad::Stored grad[kWide] = {};
  typename Master::Weight weight[kWide] = {};
  typename Master::Rest rest[kWide] = {};
  float first[kWide] = {}, second[kWide] = {};
  const std::size_t count = on.count - at;
  const auto move = [&](auto&& pass) {
    pass(weight, static_cast<typename Master::Weight*>(on.weight));
    pass(rest, static_cast<typename Master::Rest*>(on.rest));
    pass(first, on.first);
    pass(second, on.second);
  };
  copy(grad, static_cast<const typename Grad::Stored*>(on.grad) + at, count);
  move([&](auto* here, auto* there) { copy(here, there ? there + at : there, count); });
  const std::size_t bad =
      step_some<Rule, Grad, Master, part>(grad, weight, rest, first, second, by);
  move([&](auto* here, auto* there) { copy(there ? there + at : there, here, count); });
  return bad < count ? at + bad : on.count;
}

template <class Rule, class Grad, class Master, Part part>
std::size_t step_tile(const Tile& on, const Coefficients& given) noexcept {
  const Coefficients by = given;
  const auto* grad = static_cast<const typename Grad::Stored*>(on.grad);
  auto* weight = static_cast<typename Master::Weight*>(on.weight);
  auto* rest = static_cast<typename Master::Rest*>(on.rest);
  float *first = on.first, *second = on.second;
  std::size_t bad = on.count;
  std::size_t i = 0;
  for (; i + kWide <= on.count; i += kWide) {
    prefetch(grad + i, kWide);
    if constexpr (part != Part::moments) {
      prefetch(weight + i, kWide);
      prefetch(rest + i, kWide);
    }
    prefetch(first + i, kWide);
    prefetch(second + i, kWide);
    const std::size_t here = step_some<Rule, Grad, Master, part>(grad + i, weight + i, rest + i,
                                                                 first + i, second + i, by);
    if (here < kWide && bad == on.count) [[unlikely]]
      bad = i + here;
  }
  if (i < on.count) {
    const std::size_t here = step_rest<Rule, Grad, Master, part>(on, i, by);
    if (bad == on.count) bad = here;
  }
  return bad;
}
