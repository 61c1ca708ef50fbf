# Every check and test. All run, even when an early one fails; pytest runs last, and ends with the table of what was
# executed how, for which the others leave their results in EXECUTED.

FAILED_CHECKS=()
EXECUTED=""

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

# of_this_compiler <build folder>: CMake never asks again which compiler a folder is for.
of_this_compiler() {
  local kept="$1/compiler"
  [[ "$(cat "$kept" 2>/dev/null)" == "$CXX_TEXT" ]] && return
  rm -rf "$1"
  mkdir -p "$1"
  printf '%s\n' "$CXX_TEXT" >"$kept"
}

# In a subshell: a failing step ends this check, not the suite.
cpp_tests() (
  build="$KT_ROOT/build/cpp-tests" bin="$VENV/bin"
  of_this_compiler "$build"
  step "Configuring the C++ tests" env CXX="${CXX_COMMAND[*]}" "$bin/cmake" -S "$KT_ROOT/kernel" -B "$build" -G Ninja \
    -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_BUILD_TYPE=Release \
    -DKT_BUILD_TESTS=ON -DKT_BUILD_PYTHON=OFF "${CMAKE_SWITCHES[@]}"
  step "Building the C++ tests" "$bin/cmake" --build "$build"
  local status=0
  "$bin/ctest" --test-dir "$build" --output-on-failure --parallel "$(nproc)" || status=$?
  executed record "$EXECUTED" native "$status" <"$build/Testing/Temporary/LastTest.log" || return 1
  return "$status"
)

executed() { "$VENV/bin/python" -m tools.executed "$@"; }

# sanitizer <address,undefined|thread>: an absent one is told, and no failure. The whole output is kept in a file.
sanitizer() {
  local log="$KT_ROOT/build/sanitize-$1.log" status=0
  of_this_compiler "$KT_ROOT/build/sanitize-${1//,/-}"
  CXX="${CXX_COMMAND[*]}" KT_CMAKE_SWITCHES="${CMAKE_SWITCHES[*]}" "$KT_ROOT/tools/sanitize.sh" --brief "$1" >"$log" 2>&1 || status=$?
  if ((status == 77)); then
    local reason
    reason="$(tail -n 1 "$log")"
    printf '%s\n' "$reason"
    executed not-run "$EXECUTED" "sanitizer $1" "${reason#not run: }"
    return "$?"
  fi
  executed record "$EXECUTED" "sanitizer $1" "$status" <"$log" || status=1
  ((status == 0)) || grep -v '^ok ' "$log" | tail -n 200
  tail -n 1 "$log"
  return "$status"
}

# Side by side: each runs on little more than one core.
sanitizers() {
  local kinds=(address,undefined thread) kind failed=0
  local -A running=()
  for kind in "${kinds[@]}"; do
    sanitizer "$kind" >"$KT_ROOT/build/sanitizer-$kind.out" 2>&1 &
    running[$kind]=$!
  done
  for kind in "${kinds[@]}"; do
    wait "${running[$kind]}" || failed=1
    printf '%s: ' "$kind"
    cat "$KT_ROOT/build/sanitizer-$kind.out"
  done
  return "$failed"
}

clang_format_check() {
  find "$KT_ROOT/kernel" \( -name '*.cpp' -o -name '*.hpp' \) -print0 | xargs -0 "$VENV/bin/clang-format" --dry-run --Werror
}

run_suite() {
  local bin="$VENV/bin"
  cd "$KT_ROOT"
  # Tests and tools look for cmake and ninja as a developer has them: on PATH.
  export PATH="$bin:$PATH"
  EXECUTED="$KT_ROOT/build/executed"
  rm -rf "$EXECUTED"
  check "C++ tests" cpp_tests
  check "ruff" "$bin/ruff" check .
  check "mypy" "$bin/mypy"
  check "clang-format" clang_format_check
  check "sanitizers" sanitizers
  # In one word: pytest would take a folder that is there for the place of the tests, before it knows the option.
  check "pytest" "$bin/python" -m pytest --executed="$EXECUTED"
  ((${#FAILED_CHECKS[@]} == 0)) && return
  printf 'These checks did not pass:%s\n' "$(printf ' %s;' "${FAILED_CHECKS[@]}")" >&2
  exit 1
}
