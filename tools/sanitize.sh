#!/usr/bin/env bash
# Builds kt_tests under sanitizers and runs it. `tools/sanitize.sh --help` explains.
set -euo pipefail

KT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly KT_ROOT

readonly NOT_RUN=77

usage() {
  cat <<'TEXT'
Usage: tools/sanitize.sh [--brief] [address,undefined|thread] [arguments of kt_tests…]

  address,undefined  every C++ test (this is what no word does)
  thread             the tests of threads, and of layers on several of them
  --brief            what `./install.sh test` runs: every kernel of every tier, threads, forks and faults, without the
                     tests whose references take minutes under a sanitizer

Needs a compiler with the sanitizers' libraries, cmake and ninja (those of an active virtual environment serve).
Builds in build/sanitize-…; runs every tier that this machine can run. The exit status is that of the tests, or 77
where the compiler has no such sanitizer, or its programs do not start here; one line says so. KT_CMAKE_SWITCHES is
passed on to cmake.

  tools/sanitize.sh address,undefined test_gemm "[amx"     only these
TEXT
}

die() {
  printf '%s\n' "$1" >&2
  exit 2
}

# A compiler may know the flag and lack the library, and a library may refuse the address space of this system.
probe() {
  local folder problem=""
  folder="$(mktemp -d)"
  printf 'int main() { return 0; }\n' >"$folder/probe.cpp"
  # shellcheck disable=SC2086 # CXX may hold a launcher
  ${CXX:-c++} "-fsanitize=$1" "$folder/probe.cpp" -o "$folder/probe" >"$folder/log" 2>&1 || problem="${CXX:-c++} cannot link"
  [[ -n "$problem" ]] || "$folder/probe" >"$folder/log" 2>&1 || problem="its programs do not start here"
  [[ -z "$problem" ]] || problem+=": $(grep -m 1 . "$folder/log" || printf 'no word')"
  rm -rf "$folder"
  [[ -z "$problem" ]] && return
  printf 'not run: no sanitizer %s, %s\n' "$1" "$problem"
  exit "$NOT_RUN"
}

# Without -g ASan would name no lines; KT_SANITIZE adds it.
build() {
  command -v cmake >/dev/null && command -v ninja >/dev/null ||
    die "cmake and ninja are not on PATH: activate the environment that ./install.sh test made, or install them"
  local switches
  read -ra switches <<<"${KT_CMAKE_SWITCHES:-}"
  cmake -S "$KT_ROOT/kernel" -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKT_BUILD_PYTHON=OFF -DKT_BUILD_TESTS=ON \
    -DKT_SANITIZE="$2" "${switches[@]}" >/dev/null
  cmake --build "$1" >"$1/build.log" || { tail -n 30 "$1/build.log" >&2 && die "the sanitized tests do not build"; }
}

brief=no
[[ "${1:-}" != --brief ]] || { brief=yes && shift; }
kind="${1:-address,undefined}"
(($# == 0)) || shift
case "$kind" in
  --help | -h) usage && exit 0 ;;
  address,undefined)
    # A request for more memory than there is must come back as null: a test makes one.
    export ASAN_OPTIONS="allocator_may_return_null=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
    export UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:${UBSAN_OPTIONS:-}"
    tests=()
    # What these run, others run too, on fewer shapes and numbers.
    [[ "$brief" == no ]] || tests=(--without "gemm: one block" --without "layer: close to float64"
      --without "gate: every formula" --without "pool: ten thousand" --without "fork: while another thread"
      --without "gemm: gate and up of every number" --without "bits: a token alone")
    ;;
  thread)
    export TSAN_OPTIONS="halt_on_error=1:allocator_may_return_null=1:${TSAN_OPTIONS:-}"
    # The sanitizer does not support threads in the child of a process that had some.
    tests=(test_thread_pool test_context test_moe_bits test_moe_routing "same bytes whatever tier" --without "fork:")
    # Long batches on few threads: what they share is shared in "any number of threads", too.
    [[ "$brief" == no ]] || tests+=(--without "bits: a token alone" --without "bits: long inputs"
      --without "bits: more rows" --without "routing: all tokens" --without "routing: one token to every"
      --without "pool: ten thousand")
    ;;
  *) die "no sanitizers named \"$kind\": address,undefined or thread" ;;
esac
(($# == 0)) || tests=("$@")

probe "$kind"
folder="$KT_ROOT/build/sanitize-${kind//,/-}"
build "$folder" "$kind"
exec "$folder/tests/kt_tests" "${tests[@]}"
