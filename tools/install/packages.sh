# Which package brings what, for the package managers people have.

# Test hook: another os-release file.
package_manager() {
  local file="${KT_OS_RELEASE:-/etc/os-release}" ids=""
  [[ ! -r "$file" ]] || ids="$(sed -n 's/^ID\(_LIKE\)\{0,1\}=//p' "$file" | tr -d '"' | tr '\n' ' ')"
  local id
  for id in $ids; do
    case "$id" in
      debian | ubuntu) echo apt && return ;;
      fedora | rhel | centos | rocky | almalinux | amzn | ol) echo dnf && return ;;
      arch | manjaro) echo pacman && return ;;
      alpine) echo apk && return ;;
      suse | opensuse* | sles) echo zypper && return ;;
    esac
  done
  echo unknown
}

# package <manager> <thing>: the thing is compiler, python, venv or headers; Python's version is 3.11 where it is not known.
package() {
  local version="${PYTHON_VERSION:-3.11}"
  local digits="${version//./}"
  case "$1:$2" in
    apt:compiler) echo "g++" ;;
    dnf:compiler | zypper:compiler) echo "gcc-c++" ;;
    pacman:compiler) echo "gcc" ;;
    apk:compiler) echo "g++" ;;
    apt:python) echo "python3.11 python3.11-venv python3.11-dev" ;;
    apt:venv) echo "python${version}-venv" ;;
    apt:headers) echo "python${version}-dev" ;;
    dnf:python) echo "python3.11 python3.11-pip python3.11-devel" ;;
    dnf:venv) echo "python${version}-pip" ;;
    dnf:headers) echo "python${version}-devel" ;;
    zypper:python) echo "python311 python311-pip python311-devel" ;;
    zypper:venv) echo "python${digits}-pip" ;;
    zypper:headers) echo "python${digits}-devel" ;;
    pacman:*) echo "python" ;;
    apk:python | apk:headers) echo "python3-dev" ;;
    apk:venv) echo "py3-pip" ;;
  esac
}

install_verb() {
  case "$1" in
    apt) echo "apt install" ;;
    dnf) echo "dnf install" ;;
    pacman) echo "pacman -S" ;;
    apk) echo "apk add" ;;
    zypper) echo "zypper install" ;;
  esac
}

# install_commands <thing…>: one command for this distribution, or one for each known manager.
install_commands() {
  local managers manager thing name
  managers="$(package_manager)"
  if [[ "$managers" == unknown ]]; then managers="apt dnf pacman apk zypper"; fi
  say "The packages that bring it (as root):"
  for manager in $managers; do
    local -a names=()
    for thing in "$@"; do
      for name in $(package "$manager" "$thing"); do
        [[ " ${names[*]-} " == *" $name "* ]] || names+=("$name")
      done
    done
    say "  $(install_verb "$manager") ${names[*]}"
  done
}
