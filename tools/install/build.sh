# Makes the environment and installs into it, once for each state of the sources.

install_all() {
  local stamp="$VENV/ktransformers-install.stamp" wanted
  mkdir -p "$(dirname "$LOG")"
  : >"$LOG"
  make_environment
  wanted="$(source_state)"
  if is_installed "$stamp" "$wanted"; then
    say "Already installed from these sources in $VENV."
    return
  fi
  rm -f "$stamp"
  if [[ -n "$TORCH_SPEC" ]]; then
    # shellcheck disable=SC2086 # the spec may carry pip options
    step "Installing $TORCH_SPEC (a few minutes)" "$PYTHON_PATH" -m pip install $TORCH_SPEC
  fi
  step "Building the kernel and installing ktransformers$EXTRAS (a few minutes)" install_package
  step "Loading the kernel" in_subshell load_kernel
  printf '%s\n' "$wanted" >"$stamp"
}

make_environment() {
  if [[ "$VENV_NEW" == yes ]]; then
    step "Making the environment $VENV" "$PYTHON_PATH" -m venv "$VENV"
    PYTHON_PATH="$VENV/bin/python"
  elif [[ "$PYTHON_PIP" == no ]]; then
    step "Bringing pip into $VENV" "$PYTHON_PATH" -m ensurepip
  fi
}

# One line for everything that decides what the build makes.
source_state() {
  local sources
  sources="$(
    cd "$KT_ROOT"
    find pyproject.toml README.md LICENSE kernel ktransformers optimize_rules -type f \
      ! -path '*/__pycache__/*' ! -path '*_cache/*' ! -name '*.so' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
  )"
  printf '%s %s %s %s %s' "$sources" "${CMAKE_SWITCHES[*]}" "$CXX_TEXT" "$PYTHON_VERSION" "$EXTRAS"
}

# is_installed <stamp> <state>: a plain install is also satisfied by one that has the test tools.
is_installed() {
  [[ -r "$1" ]] || return 1
  local found
  found="$(<"$1")"
  [[ "$found" == "$2" || "$found" == "$2[test]" ]] || return 1
  (cd / && "$PYTHON_PATH" -c 'import kt_kernel, importlib.metadata as m; m.version("ktransformers"), m.version("torch")') >/dev/null 2>&1
}

install_package() {
  local switch
  local -a settings=()
  for switch in "${CMAKE_SWITCHES[@]}"; do
    # Written out: pip before 23.1 (Debian 12 has 23.0) does not know -C.
    settings+=("--config-settings=cmake.define.${switch#-D}")
  done
  CXX="${CXX_COMMAND[*]}" "$PYTHON_PATH" -m pip install --verbose "${settings[@]}" "$KT_ROOT$EXTRAS"
}

in_subshell() ("$@")

# The build may succeed and the result still not load: say it now, not at the first prompt.
load_kernel() {
  cd / # away from the sources, which would be imported in place of what was installed
  "$PYTHON_PATH" -c 'import kt_kernel, ktransformers; print(kt_kernel.cpu_info())'
}

say_how_to_go_on() {
  say ""
  if [[ "${VIRTUAL_ENV:-}" != "$VENV" && "${CONDA_PREFIX:-}" != "$VENV" ]]; then
    say "Next:  source $VENV/bin/activate"
  fi
  say "       kt doctor                     what runs on this machine, and why"
  say "       ./install.sh demo             a small model writes through the kernel"
}
