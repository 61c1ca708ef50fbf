# Finds Python and the environment to install into.

# Prints: version, executable, in an environment, has venv, has pip, has headers, header folder, prefix. One start of Python.
python_facts() {
  "$@" -I - 2>/dev/null <<'CODE'
import importlib.util as util, os, sys, sysconfig

def has(name):
    return "yes" if util.find_spec(name) is not None else "no"

version = "%d.%d" % sys.version_info[:2]
include = sysconfig.get_path("include")
venv = "yes" if has("venv") == "yes" and has("ensurepip") == "yes" else "no"
header = "yes" if os.path.isfile(os.path.join(include, "Python.h")) else "no"
print("|".join([version, sys.executable, "yes" if sys.prefix != sys.base_prefix else "no", venv, has("pip"), header, include, sys.prefix]))
CODE
}

new_enough() {
  local major="${1%%.*}" minor="${1#*.}"
  ((major == 3 && minor >= 11 || major > 3))
}

# read_python <command>: fills PYTHON_*; fails when it is no Python.
read_python() {
  local facts
  facts="$(python_facts "$1")" || return 1
  IFS='|' read -r PYTHON_VERSION PYTHON_PATH PYTHON_ISOLATED PYTHON_VENV PYTHON_PIP PYTHON_HEADER PYTHON_INCLUDE PYTHON_PREFIX <<<"$facts"
  [[ -n "$PYTHON_VERSION" && -n "$PYTHON_PATH" ]]
}

# Sets PYTHON_* and VENV (the environment's folder) and VENV_NEW; misses otherwise.
find_python() {
  PYTHON_VERSION="" PYTHON_PATH="" VENV="$KT_ROOT/.venv" VENV_NEW=yes
  if [[ -n "${PYTHON:-}" ]]; then
    use_python "$PYTHON" "PYTHON=$PYTHON" || return 0
  elif [[ -n "${VIRTUAL_ENV:-}" ]]; then
    use_python "$VIRTUAL_ENV/bin/python" "the active environment $VIRTUAL_ENV" || return 0
  elif [[ -n "${CONDA_PREFIX:-}" && "${CONDA_DEFAULT_ENV:-}" != base ]]; then
    use_python "$CONDA_PREFIX/bin/python" "the active conda environment $CONDA_PREFIX" || return 0
    PYTHON_ISOLATED=yes
  elif [[ -x "$VENV/bin/python" ]]; then
    use_python "$VENV/bin/python" "the environment $VENV" || return 0
  else
    search_python || return 0
  fi
  if [[ "$PYTHON_ISOLATED" == yes ]]; then
    VENV="$PYTHON_PREFIX" VENV_NEW=no
  fi
  check_python_parts
}

# use_python <command> <how it was asked for>
use_python() {
  if ! read_python "$1"; then
    miss "$2: it does not run as Python." python
    PYTHON_VERSION=""
    return 1
  fi
  if ! new_enough "$PYTHON_VERSION"; then
    miss "$2 is Python $PYTHON_VERSION; 3.11 or newer is needed. Leave or remove it, or name another: PYTHON=python3.12 ./install.sh" python
    return 1
  fi
}

search_python() {
  local name found=""
  for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
    command -v "$name" >/dev/null || continue
    read_python "$name" || continue
    new_enough "$PYTHON_VERSION" && return 0
    found+=" $PYTHON_PATH is $PYTHON_VERSION."
  done
  PYTHON_VERSION=""
  miss "There is no Python 3.11 or newer on the PATH.$found" python
  return 1
}

check_python_parts() {
  if [[ "$PYTHON_HEADER" == no ]]; then
    miss "Python.h is not in $PYTHON_INCLUDE: the headers of $PYTHON_PATH ($PYTHON_VERSION) are needed to compile." headers
  fi
  if [[ "$VENV_NEW" == yes && "$PYTHON_VENV" == no ]]; then
    miss "$PYTHON_PATH ($PYTHON_VERSION) cannot make virtual environments: its venv or ensurepip module is missing." venv
  elif [[ "$VENV_NEW" == no && "$PYTHON_PIP" == no && "$PYTHON_VENV" == no ]]; then
    miss "the environment $VENV has no pip, and its Python has no ensurepip to bring it." venv
  fi
}
