#include "crc32c.h"

#include <array>
#include <cstring>
#if defined(PENSTOCK_X86)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace penstock {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::uint32_t, 256>;

// Slicing by eight: table k advances a byte by k more zero bytes.
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}
constexpr std::array<Table, 8> kTables = make_tables();

std::uint64_t load(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// One instruction advances a remainder by eight bytes, or by one.
#if defined(PENSTOCK_X86)
#define PENSTOCK_CRC_TARGET [[gnu::target("sse4.2")]]
PENSTOCK_CRC_TARGET inline std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) {
  return _mm_crc32_u64(crc, word);
}
PENSTOCK_CRC_TARGET inline std::uint32_t add_byte(std::uint32_t crc, std::byte byte) {
  return _mm_crc32_u8(crc, std::to_integer<unsigned char>(byte));
}
#elif defined(__aarch64__)
#define PENSTOCK_CRC_TARGET [[gnu::target("+crc")]]
PENSTOCK_CRC_TARGET inline std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
PENSTOCK_CRC_TARGET inline std::uint32_t add_byte(std::uint32_t crc, std::byte byte) {
  return __crc32cb(crc, std::to_integer<std::uint8_t>(byte));
}
#endif

#ifdef PENSTOCK_CRC_TARGET
// The instruction has a latency of three cycles and a throughput of one per cycle, so three streams
// run interleaved. Their remainders are combined by advancing each over the bytes of the next
// stream.
constexpr std::size_t kStream = 4096;

using Advance = std::array<Table, 4>;

// Advancing over `kStream` zero bytes is linear, so one table per byte of the remainder is enough.
Advance make_advance() {
  Advance advance{};
  for (std::size_t place = 0; place < 4; ++place) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte << (8 * place);
      for (std::size_t i = 0; i < kStream; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xff];
      advance[place][byte] = crc;
    }
  }
  return advance;
}

std::uint32_t over_stream(const Advance& advance, std::uint32_t crc) {
  return advance[0][crc & 0xff] ^ advance[1][crc >> 8 & 0xff] ^ advance[2][crc >> 16 & 0xff] ^
         advance[3][crc >> 24];
}

// Adds the bytes one after another. Takes and returns the remainder itself, not inverted.
PENSTOCK_CRC_TARGET std::uint32_t add_serially(const std::byte* at, std::size_t bytes,
                                               std::uint64_t crc) noexcept {
  for (; bytes >= 8; at += 8, bytes -= 8) crc = add_word(crc, load(at));
  auto tail = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; ++at, --bytes) tail = add_byte(tail, *at);
  return tail;
}

PENSTOCK_CRC_TARGET std::uint32_t crc32c_instruction(const std::byte* at, std::size_t bytes,
                                                     std::uint32_t before) noexcept {
  static const Advance advance = make_advance();
  std::uint64_t crc = ~before;
  for (; bytes >= 3 * kStream; at += 3 * kStream, bytes -= 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      crc = add_word(crc, load(at + i));
      second = add_word(second, load(at + kStream + i));
      third = add_word(third, load(at + 2 * kStream + i));
    }
    crc = over_stream(advance, static_cast<std::uint32_t>(crc)) ^ second;
    crc = over_stream(advance, static_cast<std::uint32_t>(crc)) ^ third;
  }
  return ~add_serially(at, bytes, crc);
}
#endif

#ifdef PENSTOCK_X86
// Returns x^n modulo the polynomial, reflected, in the position in which a carry-less product of
// reflected numbers has its result.
constexpr std::uint64_t power_of_x(unsigned n) {
  std::uint32_t power = 0x80000000;  // x^0
  for (unsigned i = 0; i < n; ++i) power = power & 1 ? (power >> 1) ^ kPolynomial : power >> 1;
  return std::uint64_t{power} << 1;
}

// 16 bytes are congruent to their product with x^distance, `distance` bits further on, where they
// are added to the bytes there. Each half has a factor of its own.
template <unsigned distance>
constexpr std::uint64_t kFold[2] = {power_of_x(distance + 32), power_of_x(distance - 32)};

#define PENSTOCK_FOLD_TARGET [[gnu::target("avx512f,vpclmulqdq,pclmul,sse4.2")]]

template <unsigned distance>
PENSTOCK_FOLD_TARGET inline __m128i fold(__m128i from, __m128i onto) {
  const __m128i factors = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFold<distance>));
  const __m128i low = _mm_clmulepi64_si128(from, factors, 0x00);
  return _mm_xor_si128(onto, _mm_xor_si128(low, _mm_clmulepi64_si128(from, factors, 0x11)));
}

PENSTOCK_FOLD_TARGET inline __m512i fold(__m512i from, __m512i factors, __m512i onto) {
  constexpr int kExclusiveOr = 0x96;  // of three operands
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(from, factors, 0x00),
                                   _mm512_clmulepi64_epi128(from, factors, 0x11), onto,
                                   kExclusiveOr);
}

template <unsigned distance>
PENSTOCK_FOLD_TARGET inline __m512i broadcast_factors() {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFold<distance>)));
}

constexpr std::size_t kFolded = 256;  // bytes of four registers

// Folds 256 bytes onto the next 256 until 16 are left, and their remainder is that of all. One
// sequential stream of wide loads runs twice as fast as three streams of eight bytes, in the cache
// and from memory.
PENSTOCK_FOLD_TARGET std::uint32_t crc32c_folded(const std::byte* at, std::size_t bytes,
                                                 std::uint32_t before) noexcept {
  if (bytes < 2 * kFolded) return ~add_serially(at, bytes, ~before);
  __m512i a = _mm512_loadu_si512(at);
  __m512i b = _mm512_loadu_si512(at + 64);
  __m512i c = _mm512_loadu_si512(at + 128);
  __m512i d = _mm512_loadu_si512(at + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~before))));
  const __m512i far = broadcast_factors<8 * kFolded>();
  for (at += kFolded, bytes -= kFolded; bytes >= kFolded; at += kFolded, bytes -= kFolded) {
    a = fold(a, far, _mm512_loadu_si512(at));
    b = fold(b, far, _mm512_loadu_si512(at + 64));
    c = fold(c, far, _mm512_loadu_si512(at + 128));
    d = fold(d, far, _mm512_loadu_si512(at + 192));
  }
  const __m512i near = broadcast_factors<512>();
  const __m512i whole = fold(fold(fold(a, near, b), near, c), near, d);
  __m128i left = fold<128>(_mm512_castsi512_si128(whole), _mm512_extracti32x4_epi32(whole, 1));
  left = fold<128>(left, _mm512_extracti32x4_epi32(whole, 2));
  left = fold<128>(left, _mm512_extracti32x4_epi32(whole, 3));
  std::uint64_t crc = add_word(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(left)));
  crc = add_word(crc, static_cast<std::uint64_t>(_mm_extract_epi64(left, 1)));
  return ~add_serially(at, bytes, crc);
}
#endif

bool has_instruction() noexcept {
#if defined(PENSTOCK_X86)
  return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return false;
#endif
}

}  // namespace

std::uint32_t crc32c_table(const std::byte* at, std::size_t bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  for (; bytes >= 8; at += 8, bytes -= 8) {
    const std::uint64_t word = load(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; bytes > 0; ++at, --bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*at)) & 0xff];
  }
  return ~crc;
}

const std::vector<Crc32cVariant>& crc32c_variants() {
  static const std::vector<Crc32cVariant> variants = [] {
    std::vector<Crc32cVariant> found{{"table", crc32c_table}};
#ifdef PENSTOCK_CRC_TARGET
    if (has_instruction()) found.push_back({"instruction", crc32c_instruction});
#endif
#ifdef PENSTOCK_X86
    if (has_instruction() && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul")) {
      found.push_back({"folded", crc32c_folded});
    }
#endif
    return found;
  }();
  return variants;
}

bool crc32c_is_hardware() noexcept {
  static const bool is = has_instruction();
  return is;
}

std::uint32_t crc32c(const std::byte* at, std::size_t bytes, std::uint32_t before) noexcept {
  static const auto fastest = crc32c_variants().back().run;
  return fastest(at, bytes, before);
}

}  // namespace penstock
