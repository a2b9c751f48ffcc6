// Selection of the instruction set. Every kernel gives the same bits on each of them, so the choice
// affects only speed.
#pragma once

#include <string>
#include <vector>

namespace penstock {

enum class Isa { baseline, avx2, avx512 };

// Returns the best instruction set that was compiled, that this processor supports, and that the
// environment variable PENSTOCK_ISA allows as a maximum: baseline, avx2 or avx512, in upper or
// lower case. The variable is read once. Any other value throws std::invalid_argument: silently
// using the best one would make a person measure something else than requested.
Isa best_isa();

// Returns the instruction sets that can run here, slowest first.
std::vector<Isa> usable_isas();

const char* name_of(Isa isa) noexcept;

}  // namespace penstock
