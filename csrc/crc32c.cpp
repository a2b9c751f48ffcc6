#include "crc32c.h"

#include <array>
#include <cstring>
#ifdef PENSTOCK_X86
#include <nmmintrin.h>
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

#ifdef PENSTOCK_X86
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

[[gnu::target("sse4.2")]] std::uint32_t crc_hardware(const std::byte* at, std::size_t bytes,
                                                     std::uint32_t before) {
  static const Advance advance = make_advance();
  std::uint64_t crc = ~before;
  for (; bytes >= 3 * kStream; at += 3 * kStream, bytes -= 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      crc = _mm_crc32_u64(crc, load(at + i));
      second = _mm_crc32_u64(second, load(at + kStream + i));
      third = _mm_crc32_u64(third, load(at + 2 * kStream + i));
    }
    crc = over_stream(advance, static_cast<std::uint32_t>(crc)) ^ second;
    crc = over_stream(advance, static_cast<std::uint32_t>(crc)) ^ third;
  }
  for (; bytes >= 8; at += 8, bytes -= 8) crc = _mm_crc32_u64(crc, load(at));
  auto tail = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; ++at, --bytes) tail = _mm_crc32_u8(tail, std::to_integer<unsigned char>(*at));
  return ~tail;
}
#endif

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

bool crc32c_is_hardware() noexcept {
#ifdef PENSTOCK_X86
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
#else
  return false;
#endif
}

std::uint32_t crc32c(const std::byte* at, std::size_t bytes, std::uint32_t before) noexcept {
#ifdef PENSTOCK_X86
  if (crc32c_is_hardware()) return crc_hardware(at, bytes, before);
#endif
  return crc32c_table(at, bytes, before);
}

}  // namespace penstock
