// Pages that can be mapped at several addresses: the operating system's interface for the KV cache.
// An address range is reserved without memory. Pages come from one anonymous file, so that a page
// can appear at two addresses, and move from one to another without a copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Except for the noexcept functions, all of these throw std::system_error with the name of the
// failing call.

// Opens an empty anonymous file. It disappears when it is closed and no mapping of it is left.
int open_pages(const char* name);
void close_pages(int fd) noexcept;

// Extends the file. This reserves offsets in the file but allocates no memory.
void extend_pages(int fd, std::size_t bytes);

// Allocates memory for [offset, offset + bytes) now, zero-filled, so that no later write can fail.
void commit_pages(int fd, std::size_t offset, std::size_t bytes);

// Releases memory. A mapping of it reads zeros afterwards.
void punch_pages(int fd, std::size_t offset, std::size_t bytes);

// Reserves address space at a multiple of `align` in which every access faults.
std::uintptr_t reserve_range(std::size_t bytes, std::size_t align);
void release_range(std::uintptr_t at, std::size_t bytes) noexcept;

// Maps a part of the file at `at`, replacing what was mapped there.
void map_pages(std::uintptr_t at, std::size_t bytes, int fd, std::size_t offset, bool writable);

// Makes every access to the range fault again.
void unmap_pages(std::uintptr_t at, std::size_t bytes);

}  // namespace penstock
