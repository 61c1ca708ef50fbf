# Finds a C++20 compiler and asks it what it can emit.

readonly LEAST_GCC=11 LEAST_CLANG=14

# compiler_version <command…>: "12.2.0", or nothing when it is no compiler.
compiler_version() {
  local question text
  for question in -dumpfullversion -dumpversion; do # clang and old gcc know only the second
    text="$("$@" "$question" 2>/dev/null </dev/null)" || text=""
    if [[ "$text" =~ ^[0-9]+(\.[0-9]+)*$ ]]; then
      printf '%s' "$text"
      return
    fi
  done
}

compiler_family() {
  local text
  text="$("$@" --version 2>/dev/null </dev/null)" || text=""
  if [[ "${text,,}" == *clang* ]]; then echo clang; else echo gcc; fi
}

# compiles <flags> <source> <command…>
compiles() {
  local flags="$1" source="$2" status=0 folder
  shift 2
  folder="$(mktemp -d)"
  # shellcheck disable=SC2086 # flags are several words
  "$@" -x c++ -std=c++20 $flags - -o "$folder/probe" <<<"$source" >/dev/null 2>&1 || status=1
  rm -rf "$folder"
  return "$status"
}

# compiler_fault <command…>: why this compiler will not do, or nothing.
compiler_fault() {
  local version family least
  version="$(compiler_version "$@")"
  [[ -n "$version" ]] || { printf 'does not answer like g++ or clang++' && return; }
  family="$(compiler_family "$@")"
  least=$LEAST_GCC
  [[ "$family" == clang ]] && least=$LEAST_CLANG
  if ((${version%%.*} < least)); then
    printf 'is %s %s, too old: C++20 needs g++ %s or clang++ %s' "$family" "$version" "$LEAST_GCC" "$LEAST_CLANG"
  elif ! compiles "" $'#include <concepts>\nint main() { return std::integral<int> ? 0 : 1; }' "$@"; then
    printf 'is %s %s, but cannot compile and link a one-line C++20 program (is its standard library there?)' "$family" "$version"
  fi
}

# The C++ partner of a C compiler: gcc-13 → g++-13, clang → clang++.
partner_of() {
  local folder="" base="${1##*/}"
  [[ "$1" == */* ]] && folder="${1%/*}/"
  case "$base" in
    gcc*) printf '%sg++%s' "$folder" "${base#gcc}" ;;
    *-gcc) printf '%s%sg++' "$folder" "${base%gcc}" ;;
    clang*) printf '%sclang++%s' "$folder" "${base#clang}" ;;
  esac
}

# Sets CXX_COMMAND (array), CXX_PATH, CXX_TEXT; misses otherwise.
find_compiler() {
  CXX_COMMAND=()
  local -a asked=()
  local partner=""
  [[ -z "${CC:-}" ]] || partner="$(partner_of "$CC")"
  if [[ -n "${CXX:-}" ]]; then
    read -ra asked <<<"$CXX"
    use_asked_compiler "CXX=$CXX" "${asked[@]}"
    check_pair
  elif [[ -n "$partner" ]] && command -v "$partner" >/dev/null; then
    use_asked_compiler "CC=$CC, so $partner" "$partner"
  else
    search_compiler
  fi
  ((${#CXX_COMMAND[@]})) || return 0
  CXX_PATH="$(command -v "${CXX_COMMAND[0]}")"
  CXX_TEXT="$CXX_PATH ($(compiler_family "${CXX_COMMAND[@]}") $(compiler_version "${CXX_COMMAND[@]}"))"
}

# use_asked_compiler <how it was asked for> <command…>: this one or a miss, never another.
use_asked_compiler() {
  local how="$1" fault
  shift
  if ! command -v "$1" >/dev/null; then
    miss "$how: there is no such command." compiler
    return
  fi
  fault="$(compiler_fault "$@")"
  if [[ -n "$fault" ]]; then
    miss "$how: $(command -v "$1") $fault." compiler
    return
  fi
  CXX_COMMAND=("$@")
}

# A new C compiler beside an old C++ compiler (or the reverse) is a half-upgraded toolset.
check_pair() {
  [[ -n "${CC:-}" ]] && ((${#CXX_COMMAND[@]})) || return 0
  local -a c_command
  local c_version c_family version family
  read -ra c_command <<<"$CC"
  c_version="$(compiler_version "${c_command[@]}")"
  c_family="$(compiler_family "${c_command[@]}")"
  version="$(compiler_version "${CXX_COMMAND[@]}")"
  family="$(compiler_family "${CXX_COMMAND[@]}")"
  if [[ -z "$c_version" ]]; then
    miss "CC=$CC does not answer like gcc or clang. Only C++ is compiled here: unset CC."
  elif [[ "$family ${version%%.*}" != "$c_family ${c_version%%.*}" ]]; then
    miss "CC=$CC is $c_family $c_version and CXX=$CXX is $family $version: name two of the same version, or unset CC (only C++ is compiled here)."
  fi
}

# The first on the PATH that will do; those passed over are named.
search_compiler() {
  local name fault
  local -a passed=()
  for name in g++ c++ clang++ g++-{16,15,14,13,12,11} clang++-{22,21,20,19,18,17,16,15,14}; do
    command -v "$name" >/dev/null || continue
    fault="$(compiler_fault "$name")"
    if [[ -z "$fault" ]]; then
      CXX_COMMAND=("$name")
      ((${#passed[@]} == 0)) || printf 'Passed over: %s\n' "${passed[@]}"
      return
    fi
    passed+=("$(command -v "$name") $fault.")
  done
  if ((${#passed[@]})); then
    for fault in "${passed[@]}"; do miss "C++ compiler: $fault" compiler; done
    miss "A newer compiler can be named: CXX=/path/to/g++-13 ./install.sh"
  else
    miss "There is no C++ compiler: g++ $LEAST_GCC or clang++ $LEAST_CLANG or newer is needed." compiler
  fi
}
