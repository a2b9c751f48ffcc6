// Pages that can be mapped at several addresses: what the KV space asks of the operating system.
// An address range is reserved without memory; pages come from one anonymous file, so that the same
// page may show at two addresses and move from one to another without a copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// All of these throw std::system_error with the failing call's name, except the noexcept ones.

// An anonymous file of no length, gone when it is closed and no mapping of it is left.
int open_pages(const char* name);
void close_pages(int fd) noexcept;

// Lengthens the file: costs address space in the file, no memory.
void extend_pages(int fd, std::size_t bytes);

// Takes memory for [offset, offset + bytes) now, zero-filled, so that no later write can fail.
void commit_pages(int fd, std::size_t offset, std::size_t bytes);

// Gives memory back; a mapping of it reads zero afterwards.
void punch_pages(int fd, std::size_t offset, std::size_t bytes);

// Address space at a multiple of `align` where every access faults.
std::uintptr_t reserve_range(std::size_t bytes, std::size_t align);
void release_range(std::uintptr_t at, std::size_t bytes) noexcept;

// Shows part of the file at `at`, in place of what was there.
void map_pages(std::uintptr_t at, std::size_t bytes, int fd, std::size_t offset, bool writable);

// Back to a range where every access faults.
void unmap_pages(std::uintptr_t at, std::size_t bytes);

}  // namespace penstock
