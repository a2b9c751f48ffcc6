#include "isa.h"

#include <cstdlib>

namespace penstock {
namespace {

bool runs_here(Isa isa) {
#ifdef PENSTOCK_X86
  switch (isa) {
    case Isa::baseline:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::baseline;
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
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (runs_here(isa)) usable.push_back(isa);
  }
  return usable;
}

Isa best_isa() {
  static const Isa best = [] {
    const char* cap = std::getenv("PENSTOCK_ISA");
    Isa found = Isa::baseline;
    for (const Isa isa : usable_isas()) {
      found = isa;
      if (cap != nullptr && std::string{cap} == name_of(isa)) break;
    }
    return found;
  }();
  return best;
}

}  // namespace penstock
