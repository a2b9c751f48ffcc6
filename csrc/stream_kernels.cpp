// Compiled once per instruction set. Nothing here may use an inline function of another header: the
// linker keeps one copy of such a function for the whole program, which could be the one compiled
// for AVX-512, and would crash on a processor without it.
#include "stream.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace penstock::PENSTOCK_ISA {
namespace {

#if defined(__AVX512F__)
using Vec = __m512i;
inline Vec load(const std::byte* at) { return _mm512_loadu_si512(at); }
inline void store_past_cache(std::byte* at, Vec v) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(at), v);
}
inline Vec both(Vec a, Vec b) { return _mm512_xor_si512(a, b); }
inline void settle() { _mm_sfence(); }
#elif defined(__AVX2__)
using Vec = __m256i;
inline Vec load(const std::byte* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
inline void store_past_cache(std::byte* at, Vec v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), v);
}
inline Vec both(Vec a, Vec b) { return _mm256_xor_si256(a, b); }
inline void settle() { _mm_sfence(); }
#elif defined(__SSE2__)
using Vec = __m128i;
inline Vec load(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}
inline void store_past_cache(std::byte* at, Vec v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(at), v);
}
inline Vec both(Vec a, Vec b) { return _mm_xor_si128(a, b); }
inline void settle() { _mm_sfence(); }
#else
struct Vec {
  std::uint64_t word[2];
};
inline Vec load(const std::byte* at) {
  Vec v;
  __builtin_memcpy(&v, at, sizeof v);
  return v;
}
inline void store_past_cache(std::byte* at, Vec v) { __builtin_memcpy(at, &v, sizeof v); }
inline Vec both(Vec a, Vec b) { return {{a.word[0] ^ b.word[0], a.word[1] ^ b.word[1]}}; }
inline void settle() {}
#endif

constexpr std::size_t kVec = sizeof(Vec);
constexpr std::size_t kUnroll = 8;  // number of independent loads in flight
constexpr std::size_t kStep = kUnroll * kVec;

// Returns the bytes up to the first address that is aligned for a non-temporal vector store.
inline std::size_t lead_of(const std::byte* at, std::size_t bytes) {
  const std::size_t lead = -reinterpret_cast<std::uintptr_t>(at) & (kVec - 1);
  return lead < bytes ? lead : bytes;
}

inline std::uint64_t fold(Vec v) {
  std::uint64_t words[kVec / 8];
  __builtin_memcpy(words, &v, kVec);
  std::uint64_t all = 0;
  for (const std::uint64_t word : words) all ^= word;
  return all;
}

std::uint64_t read(const std::byte* at, std::size_t bytes) noexcept {
  Vec sums[kUnroll] = {};
  std::size_t i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    for (std::size_t k = 0; k < kUnroll; ++k) sums[k] = both(sums[k], load(at + i + k * kVec));
  }
  std::uint64_t all = 0;
  for (const Vec& sum : sums) all ^= fold(sum);
  for (; i < bytes; i += 8) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, at + i, bytes - i < 8 ? bytes - i : 8);
    all ^= word;
  }
  return all;
}

void write(std::byte* at, std::size_t bytes, std::byte value) noexcept {
  std::byte one[kVec];
  __builtin_memset(one, static_cast<int>(value), kVec);
  const Vec v = load(one);
  std::size_t i = lead_of(at, bytes);
  __builtin_memset(at, static_cast<int>(value), i);
  for (; i + kStep <= bytes; i += kStep) {
    for (std::size_t k = 0; k < kUnroll; ++k) store_past_cache(at + i + k * kVec, v);
  }
  __builtin_memset(at + i, static_cast<int>(value), bytes - i);
  settle();
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::size_t i = lead_of(to, bytes);
  __builtin_memcpy(to, from, i);
  for (; i + kStep <= bytes; i += kStep) {
    Vec v[kUnroll];
    for (std::size_t k = 0; k < kUnroll; ++k) v[k] = load(from + i + k * kVec);
    for (std::size_t k = 0; k < kUnroll; ++k) store_past_cache(to + i + k * kVec, v[k]);
  }
  __builtin_memcpy(to + i, from + i, bytes - i);
  settle();
}

}  // namespace

extern const StreamKernels stream_kernels;
const StreamKernels stream_kernels{read, write, copy};

}  // namespace penstock::PENSTOCK_ISA
