#include "isa.h"

#include <cctype>
#include <cstdlib>
#include <stdexcept>

namespace penstock {
namespace {

constexpr Isa kIsas[] = {Isa::baseline, Isa::avx2, Isa::avx512};  // slowest first

bool runs_here(Isa isa) {
#ifdef PENSTOCK_X86
  switch (isa) {
    case Isa::baseline:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("f16c");
  }
#endif
  return isa == Isa::baseline;
}

Isa isa_called(const std::string& asked) {
  std::string lower;
  for (const unsigned char c : asked) lower += static_cast<char>(std::tolower(c));
  for (const Isa isa : kIsas) {
    if (lower == name_of(isa)) return isa;
  }
  throw std::invalid_argument{"PENSTOCK_ISA=" + asked +
                              " names no instruction set; choose baseline, avx2 or avx512, or "
                              "leave it unset for the best one"};
}

}  // namespace

const char* name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::baseline:
      return "baseline";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "baseline";
}

std::vector<Isa> usable_isas() {
  std::vector<Isa> usable;
  for (const Isa isa : kIsas) {
    if (runs_here(isa)) usable.push_back(isa);
  }
  return usable;
}

Isa best_isa() {
  // If the initializer throws, the next call runs it again, so that the error is reported every
  // time.
  static const Isa best = [] {
    const char* asked = std::getenv("PENSTOCK_ISA");
    const bool free = asked == nullptr || *asked == '\0';
    const Isa most = free ? Isa::avx512 : isa_called(asked);
    Isa found = Isa::baseline;
    for (const Isa isa : usable_isas()) {
      if (isa <= most) found = isa;
    }
    return found;
  }();
  return best;
}

}  // namespace penstock
