// CRC-32C (Castagnoli), the checksum for which processors have an instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// Returns the checksum of `bytes` bytes at `at`, continuing the checksum `before` of preceding
// bytes (0 at the start).
std::uint32_t crc32c(const std::byte* at, std::size_t bytes, std::uint32_t before = 0) noexcept;

// The same in software, for processors without the instruction and for tests.
std::uint32_t crc32c_table(const std::byte* at, std::size_t bytes,
                           std::uint32_t before = 0) noexcept;

bool crc32c_is_hardware() noexcept;

// One way to compute the checksum. All of them give the same result.
struct Crc32cVariant {
  const char* name;
  std::uint32_t (*run)(const std::byte* at, std::size_t bytes, std::uint32_t before) noexcept;
};

// Returns the variants that run on this processor, slowest first; crc32c() is the last one.
const std::vector<Crc32cVariant>& crc32c_variants();

}  // namespace penstock
