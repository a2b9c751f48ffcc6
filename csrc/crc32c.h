// CRC-32C (Castagnoli), the checksum that processors compute by themselves.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// The checksum of `bytes` at `at`, continuing one computed over what came before (0 at the start).
std::uint32_t crc32c(const std::byte* at, std::size_t bytes, std::uint32_t before = 0) noexcept;

// Without the processor's help, for those that have none and for comparing.
std::uint32_t crc32c_table(const std::byte* at, std::size_t bytes,
                           std::uint32_t before = 0) noexcept;

bool crc32c_is_hardware() noexcept;

}  // namespace penstock
