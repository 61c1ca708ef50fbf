# Decides what will be done, and prints it.

readonly DEFAULT_TORCH="torch==2.13.0" # the version the suite runs with
readonly LEAST_TORCH="2.6"

# Sets TORCH_VERSION when the environment holds a PyTorch that is new enough.
find_torch() {
  [[ "$VENV_NEW" == no ]] || return 0
  TORCH_VERSION="$("$PYTHON_PATH" -I - "$LEAST_TORCH" 2>/dev/null <<'CODE'
import importlib.metadata as metadata, re, sys

def numbers(text):
    return [int(part) for part in re.findall(r"\d+", text)[:2]]

version = metadata.version("torch")
if numbers(version) >= numbers(sys.argv[1]):
    print(version)
CODE
  )" || TORCH_VERSION=""
}

# Sets CMAKE_SWITCHES, TORCH_SPEC, EXTRAS and LOG.
make_plan() {
  local family switch found
  CMAKE_SWITCHES=()
  for family in AMX AVX512 AVX2; do
    switch="SWITCH_$family"
    found=OFF
    [[ "$EMITS" != *" ${family,,} "* ]] || found=ON
    CMAKE_SWITCHES+=("-DKTRANSFORMERS_CPU_USE_$family=${!switch:-$found}")
    if [[ "${!switch}" == ON && "$found" == OFF ]]; then
      say "CPUINFER_ENABLE_$family=ON, but the compiler cannot emit it: it will be left out."
    fi
  done
  TORCH_SPEC=""
  [[ -n "$TORCH_VERSION" ]] || TORCH_SPEC="${KT_TORCH_SPEC:-$DEFAULT_TORCH}"
  EXTRAS=""
  [[ "$COMMAND" != test ]] || EXTRAS="[test]"
  LOG="$KT_ROOT/build/install.log"
}

print_plan() {
  local made="" torch="keep $TORCH_VERSION"
  [[ "$VENV_NEW" == no ]] || made=" (to be made)"
  [[ -z "$TORCH_SPEC" ]] || torch="pip install $TORCH_SPEC"
  say ""
  say "compiler     $CXX_TEXT"
  say "python       $PYTHON_PATH ($PYTHON_VERSION)"
  say "environment  $VENV$made"
  say "torch        $torch"
  say "kernel       cmake ${CMAKE_SWITCHES[*]}"
  say "package      pip install .$EXTRAS"
  case "$COMMAND" in
    demo) say "then         $(quoted "${DEMO_COMMAND[@]}")" ;;
    test) say "then         the C++ tests, ruff, mypy, clang-format, sanitizers, pytest with emulated CPUs" ;;
  esac
  say ""
}
