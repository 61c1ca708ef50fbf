// The test harness of the C++ side: no dependencies, one header.
//
//   TEST("quota rounds down") { CHECK_EQ(default_threads(16, 7.65), 7); }
//
// A failed check is counted and the test goes on; an exception ends its test. Arguments of the program are substrings:
// a test runs when its name or its file contains one of them, and none that follows a --without. --list prints names.
// The exit status is 0 only when at least one test ran and none failed.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kt::check {

struct Test {
  const char* file;
  std::string name;
  std::function<void()> body;
};

// Functions own the state: a registration may run before any other static initialiser of the program.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

// Of the running test.
inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* file, std::string name, std::function<void()> body) {
    tests().push_back({file, std::move(name), std::move(body)});
  }
};

// Called by the thread that runs the tests; other threads leave their findings where it can look at them.
inline void fail(const char* file, int line, const std::string& what) {
  constexpr int kShown = 10;  // of a test: a sweep that is wrong everywhere need not say so a thousand times
  if (++failures() <= kShown) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
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

struct Options {
  bool list = false;
  std::vector<std::string> wanted;  // empty: all
  std::vector<std::string> unwanted;
};

// False, with a line on stderr, for an option that does not exist.
inline bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--list") {
      options.list = true;
    } else if (word == "--without" && i + 1 < argc) {
      options.unwanted.emplace_back(argv[++i]);
    } else if (word.starts_with("-")) {
      std::fprintf(stderr, "unknown option %s; there are --list, --without TEXT, and substrings of test names\n",
                   argv[i]);
      return false;
    } else {
      options.wanted.push_back(word);
    }
  }
  return true;
}

inline bool selected(const Test& test, const Options& options) {
  const char* slash = std::strrchr(test.file, '/');
  const std::string file = slash == nullptr ? test.file : slash + 1;
  const auto named = [&](const std::string& text) {
    return test.name.find(text) != std::string::npos || file.find(text) != std::string::npos;
  };
  for (const std::string& text : options.unwanted) {
    if (named(text)) return false;
  }
  bool wanted = options.wanted.empty();
  for (const std::string& text : options.wanted) wanted = wanted || named(text);
  return wanted;
}

inline bool run_one(const Test& test) {
  failures() = 0;
  try {
    test.body();
  } catch (const std::exception& error) {
    fail(test.file, 0, std::string("exception: ") + error.what());
  } catch (...) {
    fail(test.file, 0, "an exception that is not a std::exception");
  }
  const int failed = failures();
  std::printf("%s  %s%s\n", failed == 0 ? "ok  " : "FAIL", test.name.c_str(),
              failed == 0 ? "" : (" (" + show(failed) + " checks)").c_str());
  std::fflush(stdout);
  return failed == 0;
}

inline int run(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) return 2;
  int ran = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (!selected(test, options)) continue;
    ++ran;
    if (options.list) {
      std::printf("%s\n", test.name.c_str());
    } else if (!run_one(test)) {
      ++failed;
    }
  }
  if (!options.list) std::printf("%d tests, %d failed\n", ran, failed);
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
