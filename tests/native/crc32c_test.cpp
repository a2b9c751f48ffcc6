#include "crc32c.h"

#include <cstring>
#include <vector>

#include "check.h"

using namespace penstock;

namespace {

std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  std::uint32_t state = 1;
  for (std::byte& byte : made) byte = std::byte((state = state * 1664525 + 1013904223) >> 24);
  return made;
}

}  // namespace

TEST_CASE("crc32c matches the published check value and the examples of RFC 3720") {
  const char* digits = "123456789";
  CHECK(crc32c(reinterpret_cast<const std::byte*>(digits), 9) == 0xe3069283);
  const std::vector<std::byte> zeros(32);
  CHECK(crc32c(zeros.data(), zeros.size()) == 0x8a9136aa);
  const std::vector<std::byte> ones(32, std::byte{0xff});
  CHECK(crc32c(ones.data(), ones.size()) == 0x62a8ab43);
}

TEST_CASE("crc32c in hardware and by table agree for every length and start") {
  const auto bytes = pattern(40'000);
  for (std::size_t length = 0; length < 100; ++length) {
    for (std::size_t start = 0; start < 9; ++start) {
      CHECK(crc32c(&bytes[start], length) == crc32c_table(&bytes[start], length));
    }
  }
  for (const std::size_t length : {12'287UL, 12'288UL, 12'289UL, 24'576UL, 39'990UL}) {
    CHECK(crc32c(&bytes[3], length) == crc32c_table(&bytes[3], length));
  }
}

TEST_CASE("crc32c of parts equals crc32c of the whole") {
  const auto bytes = pattern(30'000);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const std::size_t at : {0UL, 1UL, 4096UL, 12'288UL, 29'999UL}) {
    CHECK(crc32c(&bytes[at], bytes.size() - at, crc32c(bytes.data(), at)) == whole);
  }
}

TEST_CASE("crc32c detects every single flipped bit of a block") {
  auto bytes = pattern(4096);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte(1 << bit % 8);
    CHECK(crc32c(bytes.data(), bytes.size()) != whole);
    bytes[bit / 8] ^= std::byte(1 << bit % 8);
  }
}
