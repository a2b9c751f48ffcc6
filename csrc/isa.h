// Which of the compiled instruction sets to use. Every kernel gives the same bits on each of them,
// so the choice is about speed alone.
#pragma once

#include <string>
#include <vector>

namespace penstock {

enum class Isa { baseline, avx2, avx512 };

// The best one that was compiled in, that this processor has, and that is no better than the
// environment variable PENSTOCK_ISA allows: baseline, avx2 or avx512, capitals or not. Read once.
// Any other name is a std::invalid_argument: with the best one in its place a person would measure,
// without a word, what was not asked for.
Isa best_isa();

// Those that can run here, worst first.
std::vector<Isa> usable_isas();

const char* name_of(Isa isa) noexcept;

}  // namespace penstock
