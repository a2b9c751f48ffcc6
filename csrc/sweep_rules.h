// The rules, for sweep_kernels.cpp alone (see sweep_math.h): how a gradient and a master are
// stored, what one element's step is, and the loop over a tile.

struct Bf16Grad {
  using Stored = std::uint16_t;
  static float load(Stored x) { return from_bf16(x); }
};
struct Fp16Grad {
  using Stored = std::uint16_t;
  static float load(Stored x) { return from_fp16(x); }
};
struct Fp32Grad {
  using Stored = float;
  static float load(Stored x) { return x; }
};

// kLimit: the bits of the largest master whose weight is finite.

// A bf16 weight and what it lacks. Ties go away from zero: then the remainder fits sixteen bits.
struct SplitMaster {
  using Weight = std::uint16_t;
  using Rest = std::int16_t;
  static constexpr std::uint32_t kLimit = 0x7F7F7FFF;
  static float load(const Weight& weight, const Rest& rest) {
    const auto remainder = static_cast<std::uint32_t>(std::int32_t{rest});
    return float_of((std::uint32_t{weight} << 16) + remainder);
  }
  static void store(float master, Weight& weight, Rest& rest) {
    const std::uint32_t high = (bits_of(master) + 0x8000) >> 16;
    weight = static_cast<Weight>(high);
    rest = static_cast<Rest>(bits_of(master) - (high << 16));
  }
};

struct SingleMaster {
  using Weight = float;
  using Rest = float;  // never touched
  static constexpr std::uint32_t kLimit = 0x7F7FFFFF;
  static float load(const Weight& weight, const Rest&) { return weight; }
  static void store(float master, Weight& weight, Rest&) { weight = master; }
};

struct HalfMaster {
  using Weight = std::uint16_t;
  using Rest = float;
  static constexpr std::uint32_t kLimit = 0x477FEFFF;
  static float load(const Weight&, const Rest& rest) { return rest; }
  static void store(float master, Weight& weight, Rest& rest) {
    weight = to_fp16(master);
    rest = master;
  }
};

struct Element {
  float master, first, second;
};

struct AdamWRule {
  static constexpr bool kTwoMoments = true;
  static Element step(Element old, float raw, const Coefficients& by) {
    const float g = gradient(raw, old.master, by);
    const float m = blend(old.first, g, by.fresh1);
    const float v = blend(old.second, g * g, by.fresh2);
    const float toward = by.rate * (m / (__builtin_sqrtf(v) + by.eps));
    return {old.master - (toward + by.decay * old.master), m, v};
  }
};

struct SgdRule {
  static constexpr bool kTwoMoments = false;
  static Element step(Element old, float raw, const Coefficients& by) {
    const float g = gradient(raw, old.master, by);
    const float m = by.keep * old.first + by.fresh1 * g;
    const float toward = by.rate * (by.look == 0 ? m : g + by.keep * m);
    return {old.master - (toward + by.decay * old.master), m, 0};
  }
};

struct LionRule {
  static constexpr bool kTwoMoments = false;
  static Element step(Element old, float raw, const Coefficients& by) {
    const float g = gradient(raw, old.master, by);
    const float lean = blend(old.first, g, by.fresh1);
    // Zero leans nowhere, and NaN stays NaN.
    const float toward = lean > 0 ? by.rate : lean < 0 ? -by.rate : lean;
    return {old.master - (toward + by.decay * old.master), blend(old.first, g, by.fresh2), 0};
  }
};

// A refused element keeps all it had; which was the first is found by a minimum, so that the loop
// has no branch and becomes vectors.
template <class Rule, class Grad, class Master>
std::size_t step_tile(const Tile& on, const Coefficients& given) noexcept {
  const Coefficients by = given;
  const auto* __restrict grad = static_cast<const typename Grad::Stored*>(on.grad);
  auto* __restrict weight = static_cast<typename Master::Weight*>(on.weight);
  auto* __restrict rest = static_cast<typename Master::Rest*>(on.rest);
  float* __restrict first = on.first;
  float* __restrict second = on.second;
  const auto count = static_cast<std::uint32_t>(on.count);
  std::uint32_t bad = count;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Element old{Master::load(weight[i], rest[i]), first[i],
                      Rule::kTwoMoments ? second[i] : 0};
    const Element next = Rule::step(old, Grad::load(grad[i]), by);
    const bool refused = (bits_of(next.master) & kMagnitude) > Master::kLimit;
    Master::store(refused ? old.master : next.master, weight[i], rest[i]);
    first[i] = refused ? old.first : next.first;
    if constexpr (Rule::kTwoMoments) second[i] = refused ? old.second : next.second;
    bad = least(bad, refused ? i : count);
  }
  return bad;
}
