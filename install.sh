#!/usr/bin/env bash
# Builds and installs ktransformers from this folder. `./install.sh --help` explains.
# Needs a C++20 compiler and Python 3.11 or newer; no sudo, git, CUDA, cmake or ninja.
set -euo pipefail

if ((BASH_VERSINFO[0] < 4)); then
  echo "install.sh needs bash 4 or newer, this is ${BASH_VERSION}" >&2
  exit 1
fi

KT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly KT_ROOT
for part in say packages compiler python machine plan build demo suite; do
  if [[ ! -r "$KT_ROOT/tools/install/$part.sh" ]]; then
    echo "tools/install/$part.sh is missing: this copy of the sources is incomplete, unpack the archive again" >&2
    exit 1
  fi
  # shellcheck source=/dev/null
  source "$KT_ROOT/tools/install/$part.sh"
done

usage() {
  cat <<'TEXT'
Usage: ./install.sh [install|demo|test] [--dry-run]

  install   build the kernel and install ktransformers (this is what no word does)
  demo      install, then let the small model in demo/model write text through the kernel
  test      install with the test tools, then run every check and test
  --dry-run look, print what would be done, change nothing (also KT_DRY_RUN=1)
  --help    this text

It installs into the active virtual or conda environment, else into .venv in this folder (made when missing).

Environment:
  PYTHON                     the interpreter to use, e.g. PYTHON=python3.12
  CXX, CC                    the compiler to use, e.g. CXX=g++-13
  CPUINFER_ENABLE_AMX        ON or OFF: build that tier, whatever was found. The default is ON for each that the
  CPUINFER_ENABLE_AVX512     compiler can emit, since the tier is chosen when the program runs and the result
  CPUINFER_ENABLE_AVX2       may be copied to another machine.
  KT_TORCH_SPEC              what to give to `pip install` where PyTorch 2.6 or newer is not there yet
                             (default torch==2.13.0; may carry options, see docs/install.md)
TEXT
}

parse_arguments() {
  COMMAND=""
  DRY_RUN="${KT_DRY_RUN:-0}"
  local word
  for word in "$@"; do
    case "$word" in
      --help | -h) usage && exit 0 ;;
      --dry-run) DRY_RUN=1 ;;
      install | demo | test)
        [[ -z "$COMMAND" ]] || usage_error "one of install, demo, test at a time: got $COMMAND and $word"
        COMMAND="$word"
        ;;
      *) usage_error "install.sh does not know \"$word\"$(did_you_mean "$word" install demo test --dry-run --help)" ;;
    esac
  done
  COMMAND="${COMMAND:-install}"
  case "$(read_switch "$DRY_RUN")" in
    ON) DRY_RUN=1 ;;
    OFF) DRY_RUN=0 ;;
    *) usage_error "KT_DRY_RUN is \"$DRY_RUN\": it takes 1 (look only) or 0, also spelt on/off, true/false or yes/no" ;;
  esac
  [[ -z "${KT_TORCH_SPEC:-}" || -n "${KT_TORCH_SPEC//[[:space:]]/}" ]] ||
    usage_error "KT_TORCH_SPEC is blank: it takes what pip install takes, such as $DEFAULT_TORCH; unset it for that"
}

main() {
  parse_arguments "$@"
  check_switches
  find_compiler
  find_python
  check_machine
  check_disk
  report_misses
  print_tiers
  make_plan
  print_plan
  if [[ "$DRY_RUN" == 1 ]]; then
    say "Dry run: nothing was changed."
    return
  fi
  install_all
  case "$COMMAND" in
    install) say_how_to_go_on ;;
    demo) run_demo ;;
    test) run_suite ;;
  esac
}

main "$@"
