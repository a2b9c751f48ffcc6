#include "crc32c.h"

#include <random>
#include <utility>
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
  const std::vector<std::byte> zeros(32);
  const std::vector<std::byte> ones(32, std::byte{0xff});
  std::vector<std::byte> rising;
  for (int value = 0; value < 32; ++value) rising.push_back(std::byte(value));
  const std::vector<std::byte> falling{rising.rbegin(), rising.rend()};
  // A command of iSCSI: the last example of appendix B.4.
  std::vector<std::byte> command(48);
  const std::pair<std::size_t, int> set[] = {{0, 0x01},  {1, 0xc0},  {16, 0x14}, {22, 0x04},
                                             {27, 0x14}, {31, 0x18}, {32, 0x28}, {40, 0x02}};
  for (const auto& [at, value] : set) command[at] = std::byte(value);
  for (const Crc32cVariant& variant : crc32c_variants()) {
    CHECK(variant.run(reinterpret_cast<const std::byte*>(digits), 9, 0) == 0xe3069283);
    CHECK(variant.run(zeros.data(), zeros.size(), 0) == 0x8a9136aa);
    CHECK(variant.run(ones.data(), ones.size(), 0) == 0x62a8ab43);
    CHECK(variant.run(rising.data(), rising.size(), 0) == 0x46dd794e);
    CHECK(variant.run(falling.data(), falling.size(), 0) == 0x113fdb5c);
    CHECK(variant.run(command.data(), command.size(), 0) == 0xd9963a56);
  }
}

TEST_CASE("every variant of crc32c agrees with the table for every length and start") {
  const auto bytes = pattern(40'000);
  for (const Crc32cVariant& variant : crc32c_variants()) {
    for (std::size_t length = 0; length < 800; ++length) {
      const std::size_t start = length * 7 % 65;
      CHECK(variant.run(&bytes[start], length, 0) == crc32c_table(&bytes[start], length));
    }
    for (const std::size_t length : {12'287UL, 12'288UL, 12'289UL, 24'576UL, 39'990UL}) {
      CHECK(variant.run(&bytes[3], length, 77) == crc32c_table(&bytes[3], length, 77));
    }
  }
}

TEST_CASE("every variant of crc32c agrees with the table for random parts and remainders") {
  const auto bytes = pattern(70'000);
  std::mt19937 random{20};
  for (int i = 0; i < 300; ++i) {
    const std::size_t start = random() % 4096;
    const std::size_t length = random() % (bytes.size() - start);
    const auto before = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = crc32c_table(&bytes[start], length, before);
    for (const Crc32cVariant& variant : crc32c_variants()) {
      CHECK(variant.run(&bytes[start], length, before) == expected);
    }
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
