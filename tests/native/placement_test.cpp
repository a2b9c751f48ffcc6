#include "placement.h"

#include "check.h"

using namespace penstock;

namespace {

constexpr std::size_t kUnit = kUnitBytes;

}  // namespace

TEST_CASE("the units of a stripe count from the start of the range, wherever a caller starts") {
  const Placement stripe{Policy::bind, {1, 2}, {1, 2}};
  const auto runs = runs_of(stripe, 1023 * kUnit + 5, 2 * kUnit);
  CHECK(runs.size() == 3);
  CHECK(runs[0].node == 2 && runs[0].bytes == kUnit - 5);
  CHECK(runs[1].node == 1 && runs[1].bytes == kUnit);
  CHECK(runs[2].node == 2 && runs[2].bytes == 5);
}

TEST_CASE("a split run keeps every byte once and in order") {
  const auto pieces = cut({{10, 100, 1}, {110, 7, 2}}, 30);
  std::size_t at = 10;
  for (const Run& piece : pieces) {
    CHECK(piece.offset == at && piece.bytes <= 30 && piece.bytes > 0);
    at += piece.bytes;
  }
  CHECK(at == 117 && pieces.size() == 5);
}
