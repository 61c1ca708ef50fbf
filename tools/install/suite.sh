# Every check and test. All run, even when an early one fails; pytest runs last.

FAILED_CHECKS=()

# check <title> <command…>: shows its output, notes its failure.
check() {
  local title="$1" started=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  if "$@"; then
    printf '%s: fine, %s s\n' "$title" "$((SECONDS - started))"
  else
    FAILED_CHECKS+=("$title")
    printf '%s: FAILED\n' "$title"
  fi
}

# In a subshell: a failing step ends this check, not the suite.
cpp_tests() (
  build="$KT_ROOT/build/cpp-tests" bin="$VENV/bin"
  step "Configuring the C++ tests" env CXX="${CXX_COMMAND[*]}" "$bin/cmake" -S "$KT_ROOT/kernel" -B "$build" -G Ninja \
    -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_BUILD_TYPE=Release \
    -DKT_BUILD_TESTS=ON -DKT_BUILD_PYTHON=OFF "${CMAKE_SWITCHES[@]}"
  step "Building the C++ tests" "$bin/cmake" --build "$build"
  "$bin/ctest" --test-dir "$build" --output-on-failure
)

clang_format_check() {
  find "$KT_ROOT/kernel" \( -name '*.cpp' -o -name '*.hpp' \) -print0 | xargs -0 "$VENV/bin/clang-format" --dry-run --Werror
}

run_suite() {
  local bin="$VENV/bin"
  cd "$KT_ROOT"
  check "C++ tests" cpp_tests
  check "ruff" "$bin/ruff" check .
  check "mypy" "$bin/mypy"
  check "clang-format" clang_format_check
  check "pytest" "$bin/python" -m pytest
  ((${#FAILED_CHECKS[@]} == 0)) && return
  printf 'These checks did not pass:%s\n' "$(printf ' %s;' "${FAILED_CHECKS[@]}")" >&2
  exit 1
}
