// Vectors as wide as the instruction set supports, for sweep_kernels.cpp only (see sweep_math.h).
// The compiler provides the arithmetic; this file contains what it has no operator or no good
// instruction for. Each function gives the bits of the plain expression.

#if defined(__AVX512F__)
constexpr std::size_t kWide = 16;
#elif defined(__AVX2__)
constexpr std::size_t kWide = 8;
#else
constexpr std::size_t kWide = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kWide)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kWide)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kWide)));
typedef std::int16_t Shorts __attribute__((vector_size(2 * kWide)));
typedef std::int16_t Pairs __attribute__((vector_size(4 * kWide)));  // two elements per word
typedef double Doubles __attribute__((vector_size(4 * kWide)));      // one element per two floats

inline Words bits_of(Floats x) { return reinterpret_cast<Words>(x); }
inline Floats float_of(Words bits) { return reinterpret_cast<Floats>(bits); }

// Loads from any address.
template <class Vector, class T>
inline Vector load(const T* at) {
  Vector v;
  __builtin_memcpy(&v, at, sizeof v);
  return v;
}
template <class T, class Vector>
inline void store(T* at, Vector v) {
  __builtin_memcpy(at, &v, sizeof v);
}

#if defined(__AVX512F__)  // GCC would split this into two halves
inline Words widen(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
inline Ints widen(Shorts x) { return (Ints)_mm512_cvtepi16_epi32((__m256i)x); }
inline Halves narrow(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
#else
inline Words widen(Halves x) { return __builtin_convertvector(x, Words); }
inline Ints widen(Shorts x) { return __builtin_convertvector(x, Ints); }
inline Halves narrow(Words x) { return __builtin_convertvector(x, Halves); }
#endif

// Returns the larger (or smaller) of the bound and x, or x if it is NaN, as the hardware does with
// its operands in this order.
#if defined(__AVX512F__)
inline Floats at_least(Floats bound, Floats x) { return (Floats)_mm512_max_ps(bound, x); }
inline Floats at_most(Floats bound, Floats x) { return (Floats)_mm512_min_ps(bound, x); }
inline Floats root(Floats x) { return (Floats)_mm512_sqrt_ps(x); }
inline bool any_above(Words x, Words limit) {
  return _mm512_cmpgt_epu32_mask((__m512i)x, (__m512i)limit) != 0;
}
#elif defined(__AVX2__)
inline Floats at_least(Floats bound, Floats x) { return (Floats)_mm256_max_ps(bound, x); }
inline Floats at_most(Floats bound, Floats x) { return (Floats)_mm256_min_ps(bound, x); }
inline Floats root(Floats x) { return (Floats)_mm256_sqrt_ps(x); }
inline bool any_above(Words x, Words limit) {
  return _mm256_movemask_ps((__m256)(reinterpret_cast<Ints>(x) > reinterpret_cast<Ints>(limit)));
}
#else
inline Floats at_least(Floats bound, Floats x) { return bound > x ? bound : x; }
inline Floats at_most(Floats bound, Floats x) { return bound < x ? bound : x; }
inline Floats root(Floats x) {
  for (std::size_t i = 0; i < kWide; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
inline bool any_above(Words x, Words limit) {
  bool any = false;
  for (std::size_t i = 0; i < kWide; ++i) any |= x[i] > limit[i];
  return any;
}
#endif

inline Pairs larger(Pairs a, Pairs b) { return a > b ? a : b; }

// Converts the first and the second half of the floats.
#if defined(__AVX512F__)
inline Doubles low_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline Doubles high_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
#elif defined(__AVX2__)
inline Doubles low_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline Doubles high_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
#else
inline Doubles low_doubles(Floats x) { return Doubles{x[0], x[1]}; }
inline Doubles high_doubles(Floats x) { return Doubles{x[2], x[3]}; }
#endif

inline Floats all(float x) { return x - Floats{}; }
inline Words all(std::uint32_t x) { return x - Words{}; }

// Prefetches what the loop needs 2 KiB later. The hardware's prefetchers stop at the end of each 4
// KiB page, and this does not. The address may be past the end: a prefetch never faults.
template <class T>
inline void prefetch(const T* at, std::size_t count) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at) + 2048;
  for (std::size_t i = 0; i < count * sizeof(T); i += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(begin + i));
  }
}
