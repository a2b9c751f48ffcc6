// A minimal test framework: named cases and checks that print what they saw. tests/test_native.py
// runs each case in its own process, so that the abort of a sanitizer names its case.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) { cases().push_back({name, body}); }
};

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void that(bool holds, const char* text, const char* file, int line) {
  if (holds) return;
  std::ostringstream message;
  message << file << ":" << line << ": does not hold: " << text;
  throw Failed{message.str()};
}

}  // namespace check

#define CHECK_JOIN2(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN2(a, b)
#define TEST_CASE(name)                                                                            \
  static void CHECK_JOIN(case_, __LINE__)();                                                       \
  static const check::Register CHECK_JOIN(register_, __LINE__){name, CHECK_JOIN(case_, __LINE__)}; \
  static void CHECK_JOIN(case_, __LINE__)()

#define CHECK(...) check::that(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

#define CHECK_THROWS_AS(expression, type)                                  \
  do {                                                                     \
    bool thrown = false;                                                   \
    try {                                                                  \
      (void)(expression);                                                  \
    } catch (const type&) {                                                \
      thrown = true;                                                       \
    }                                                                      \
    check::that(thrown, #expression " throws " #type, __FILE__, __LINE__); \
  } while (false)
