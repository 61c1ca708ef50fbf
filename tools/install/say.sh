# Words to the user, and running a step with its output kept in a log.

say() { printf '%s\n' "$*"; }

usage_error() {
  printf '%s\nSee ./install.sh --help\n' "$*" >&2
  exit 2
}

# quoted <word…>: as one would type it.
quoted() {
  local word line=""
  for word in "$@"; do
    [[ "$word" != *[[:space:]]* ]] || word="\"$word\""
    line+=" $word"
  done
  printf '%s' "${line# }"
}

# Misses are collected, so that one run names all of them.
MISSES=()
MISSING_PACKAGES=()

# miss <sentence> [package…]
miss() {
  MISSES+=("$1")
  shift
  MISSING_PACKAGES+=("$@")
}

report_misses() {
  ((${#MISSES[@]})) || return 0
  local sentence
  printf '\nThis cannot be installed yet:\n' >&2
  for sentence in "${MISSES[@]}"; do printf '  - %s\n' "$sentence" >&2; done
  if ((${#MISSING_PACKAGES[@]})); then
    printf '\n' >&2
    install_commands "${MISSING_PACKAGES[@]}" >&2
  fi
  exit 1
}

# edit_distance <a> <b>: Levenshtein, for words of a few letters.
edit_distance() {
  local a="$1" b="$2" i j cost best
  local -a previous current
  for ((j = 0; j <= ${#b}; j++)); do previous[j]=$j; done
  for ((i = 1; i <= ${#a}; i++)); do
    current=("$i")
    for ((j = 1; j <= ${#b}; j++)); do
      cost=1
      [[ "${a:i-1:1}" == "${b:j-1:1}" ]] && cost=0
      best=$((previous[j - 1] + cost))
      ((previous[j] + 1 < best)) && best=$((previous[j] + 1))
      ((current[j - 1] + 1 < best)) && best=$((current[j - 1] + 1))
      current[j]=$best
    done
    previous=("${current[@]}")
  done
  printf '%s' "${previous[${#b}]}"
}

# did_you_mean <word> <known…>: ", did you mean …?" or nothing.
did_you_mean() {
  local word="$1" known distance nearest="" least=4
  shift
  for known in "$@"; do
    distance="$(edit_distance "$word" "$known")"
    if ((distance < least)); then
      least=$distance
      nearest="$known"
    fi
  done
  [[ -z "$nearest" ]] || printf ', did you mean "%s"?' "$nearest"
}

# step <title> <command…>: output goes to the log; when the command fails, its first errors and its end to the terminal.
step() {
  local title="$1" started=$SECONDS status=0 before
  shift
  before="$(($(wc -c <"$LOG") + 1))"
  printf '%s … ' "$title"
  printf '\n## %s\n$ %s\n' "$title" "$*" >>"$LOG"
  "$@" >>"$LOG" 2>&1 || status=$?
  if ((status)); then
    printf 'failed\n\n'
    # What went wrong first is rarely what a build prints last.
    printf 'The first errors:\n' >&2
    tail -c "+$before" "$LOG" | grep -i -E -A 2 '(^|[^a-z_-])error[: ]|cannot find' | sed -n '1,12s/^/  | /p' >&2 || true
    printf 'The last lines:\n' >&2
    tail -n 20 "$LOG" | sed 's/^/  | /' >&2
    printf '\n%s failed (exit status %s). The whole log: %s\n' "$title" "$status" "$LOG" >&2
    exit 1
  fi
  printf 'done in %s s\n' "$((SECONDS - started))"
}
