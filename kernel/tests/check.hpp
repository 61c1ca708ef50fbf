// The test harness of the C++ side: no dependencies, one header.
//
//   TEST("quota rounds down") { CHECK_EQ(default_threads(16, 7.65), 7); }
//
// A failed check is counted and the test goes on; an exception ends its test. One translation unit says KT_TEST_MAIN().
// Arguments of the program are substrings: a test runs when its name or its file contains one of them.
// --list prints names. The exit status is 0 only when at least one test ran and none failed.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace kt::check {

struct Test {
  const char* file;
  const char* name;
  void (*body)();
};

// Functions own the state: a registration may run before any other static initialiser of the program.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* file, const char* name, void (*body)()) { tests().push_back({file, name, body}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    out << static_cast<int>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    out.precision(std::is_same_v<T, float> ? 9 : 17);
    out << value;
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    out << (value.has_value() ? show(*value) : "nothing");
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       }) {
    out << '[';
    const char* separator = "";
    for (const auto& item : value) {
      out << separator << show(item);
      separator = ", ";
    }
    out << ']';
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& got, const B& expected) {
  if (got == expected) return;
  fail(file, line, std::string(text) + "\n    got      " + show(got) + "\n    expected " + show(expected));
}

// Runs `call`; it must throw an `Expected` whose text contains `part`.
template <typename Expected, typename Call>
void throws(const char* file, int line, const char* text, Call&& call, const char* part = "") {
  try {
    call();
  } catch (const Expected& error) {
    if (std::strstr(error.what(), part) != nullptr) return;
    return fail(file, line, std::string(text) + " says '" + error.what() + "', without '" + part + "'");
  } catch (const std::exception& error) {
    return fail(file, line, std::string(text) + " threw another type: " + error.what());
  }
  fail(file, line, std::string(text) + " did not throw");
}

inline bool selected(const Test& test, int argc, char** argv) {
  bool filtered = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') continue;
    filtered = true;
    if (std::strstr(test.name, argv[i]) != nullptr || std::strstr(test.file, argv[i]) != nullptr) return true;
  }
  return !filtered;
}

inline bool run_one(const Test& test) {
  const int before = failures();
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.file, 0, std::string("exception: ") + error.what());
  } catch (...) {
    fail(test.file, 0, "an exception that is not a std::exception");
  }
  const bool passed = failures() == before;
  std::printf("%s  %s\n", passed ? "ok  " : "FAIL", test.name);
  std::fflush(stdout);
  return passed;
}

inline int run(int argc, char** argv) {
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] != '-') continue;
    if (std::strcmp(argv[i], "--list") != 0) {
      std::fprintf(stderr, "unknown option %s; there is --list, and substrings of test names\n", argv[i]);
      return 2;
    }
    list = true;
  }
  int ran = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (!selected(test, argc, argv)) continue;
    ++ran;
    if (list) {
      std::printf("%s\n", test.name);
    } else if (!run_one(test)) {
      ++failed;
    }
  }
  if (!list) std::printf("%d tests, %d failed\n", ran, failed);
  return ran > 0 && failed == 0 ? 0 : 1;
}

}  // namespace kt::check

#define KT_JOIN_(a, b) a##b
#define KT_JOIN(a, b) KT_JOIN_(a, b)

#define TEST(title)                                                                                         \
  static void KT_JOIN(kt_test_, __LINE__)();                                                                \
  static const ::kt::check::Registration KT_JOIN(kt_registration_, __LINE__)(__FILE__, title,               \
                                                                             &KT_JOIN(kt_test_, __LINE__)); \
  static void KT_JOIN(kt_test_, __LINE__)()

#define CHECK(...)                                                                        \
  do {                                                                                    \
    if (!(__VA_ARGS__)) ::kt::check::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"); \
  } while (false)

#define CHECK_EQ(got, ...) \
  ::kt::check::equal(__FILE__, __LINE__, "CHECK_EQ(" #got ", " #__VA_ARGS__ ")", (got), (__VA_ARGS__))

// CHECK_THROWS(call(x), kt::Error) or, with a part of its text, CHECK_THROWS(call(x), kt::Error, "row 3").
#define CHECK_THROWS(expression, type, ...)                                                 \
  ::kt::check::throws<type>(__FILE__, __LINE__, "CHECK_THROWS(" #expression ", " #type ")", \
                            [&] { static_cast<void>(expression); } __VA_OPT__(, ) __VA_ARGS__)

#define KT_TEST_MAIN()                   \
  int main(int argc, char** argv) {      \
    return ::kt::check::run(argc, argv); \
  }
