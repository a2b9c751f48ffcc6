// CRC-32C (Castagnoli), the checksum for which processors have an instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Returns the checksum of `bytes` bytes at `at`, continuing the checksum `before` of preceding
// bytes (0 at the start).
std::uint32_t crc32c(const std::byte* at, std::size_t bytes, std::uint32_t before = 0) noexcept;

// The same in software, for processors without the instruction and for tests.
std::uint32_t crc32c_table(const std::byte* at, std::size_t bytes,
                           std::uint32_t before = 0) noexcept;

bool crc32c_is_hardware() noexcept;

}  // namespace penstock
