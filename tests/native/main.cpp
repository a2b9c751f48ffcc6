#include <iostream>

#include "check.h"

// --list prints the cases, a name runs that case, and no argument runs all.
int main(int count, char** arguments) {
  const std::string wanted = count > 1 ? arguments[1] : "";
  int failures = 0;
  int run = 0;
  for (const check::Case& test : check::cases()) {
    if (wanted == "--list") {
      std::cout << test.name << "\n";
      continue;
    }
    if (!wanted.empty() && wanted != test.name) continue;
    ++run;
    try {
      test.body();
    } catch (const std::exception& error) {
      std::cerr << test.name << ": " << error.what() << "\n";
      ++failures;
    }
  }
  if (wanted == "--list") return 0;
  if (run == 0) std::cerr << "no case named " << wanted << "\n";
  return failures > 0 || run == 0;
}
