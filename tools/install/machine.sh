# What this machine is: processor, tiers, disk. It only informs and refuses; the kernel asks the CPU itself when it runs.

readonly FAMILIES="AVX2 AVX512 AMX"                                  # each has a switch, and a tier of its name
readonly TIERS="avx2 avx_vnni avx512 avx512_vnni avx512_bf16 amx" # above generic, ascending

# read_switch <value>: ON or OFF, in any spelling the program itself takes; nothing for another value.
read_switch() {
  case "${1,,}" in
    on | 1 | true | yes) echo ON ;;
    off | 0 | false | no) echo OFF ;;
  esac
}

# Sets SWITCH_<family> from CPUINFER_ENABLE_<family>: ON, OFF, or empty when it is not set.
check_switches() {
  local family name switch
  for family in $FAMILIES; do
    name="CPUINFER_ENABLE_$family"
    switch="$(read_switch "${!name:-}")"
    printf -v "SWITCH_$family" '%s' "$switch"
    [[ -n "$switch" || -z "${!name:-}" ]] || miss "$name is \"${!name}\": it takes ON or OFF (also 1/0, true/false, yes/no)."
  done
}

check_machine() {
  local system
  system="$(uname -s)"
  MACHINE="$(uname -m)"
  [[ "$system" == Linux ]] || miss "This is $system; ktransformers runs on Linux (elsewhere: in a Linux container or virtual machine)."
  case "$MACHINE" in
    x86_64 | amd64) MACHINE_FAMILY=x86 ;;
    aarch64 | arm64) MACHINE_FAMILY=arm ;;
    *) MACHINE_FAMILY=other ;;
  esac
  CPU_FLAGS="$(cpu_flags)"
}

# flags_in <key pattern>: the flags line of lscpu or /proc/cpuinfo text on standard input, one space around each flag.
flags_in() {
  sed -n "s/^[[:space:]]*\(Flags\|flags\|Features\)[[:space:]]*:[[:space:]]*//p" | head -n 1 | tr '[:upper:]-' '[:lower:]_' | tr -s '[:space:]' ' '
}

# cpu_flags [cpuinfo file]: lscpu first, then the file; nothing when neither tells.
cpu_flags() {
  local file="${1:-/proc/cpuinfo}" text="" flags=""
  if command -v lscpu >/dev/null; then
    text="$(LC_ALL=C lscpu 2>/dev/null)" || text=""
    flags="$(flags_in <<<"$text")"
  fi
  if [[ -z "${flags// /}" && -r "$file" ]]; then flags="$(flags_in <"$file")"; fi
  [[ -z "${flags// /}" ]] || printf ' %s ' "$flags"
}

# The tier that a tier builds on: it needs what that one needs, and more.
tier_base() {
  case "$1" in
    avx_vnni | avx512) echo avx2 ;;
    avx512_vnni) echo avx512 ;;
    avx512_bf16) echo avx512_vnni ;;
    amx) echo avx512_bf16 ;;
  esac
}

# The CPU flags of its own that a tier needs.
tier_needs() {
  case "$1" in
    avx2) echo "avx avx2 fma f16c" ;;
    avx512) echo "avx512f avx512bw avx512dq avx512vl" ;;
    amx) echo "amx_tile amx_int8 amx_bf16" ;;
    *) echo "$1" ;;
  esac
}

# What a tier's code is compiled with.
tier_flags() {
  local base own
  base="$(tier_base "$1")"
  case "$1" in
    avx2) own="-mavx2 -mfma -mf16c" ;;
    avx_vnni) own="-mavxvnni" ;;
    avx512) own="-mavx512f -mavx512bw -mavx512dq -mavx512vl" ;;
    avx512_vnni) own="-mavx512vnni" ;;
    avx512_bf16) own="-mavx512bf16" ;;
    amx) own="-mamx-tile -mamx-int8 -mamx-bf16" ;;
  esac
  [[ -z "$base" ]] || own="$(tier_flags "$base") $own"
  printf '%s' "$own"
}

# A program that the compiler and its assembler must take, so that "yes" means more than a known flag.
tier_probe() {
  local body=""
  case "$1" in
    avx2) body='__m256i a = _mm256_setzero_si256(); a = _mm256_maddubs_epi16(a, a);' ;;
    avx_vnni) body='__m256i a = _mm256_setzero_si256(); a = _mm256_dpbusd_avx_epi32(a, a, a);' ;;
    avx512) body='__m512i a = _mm512_setzero_si512(); a = _mm512_maddubs_epi16(a, a);' ;;
    avx512_vnni) body='__m512i a = _mm512_setzero_si512(); a = _mm512_dpbusd_epi32(a, a, a);' ;;
    avx512_bf16) body='__m512 f = _mm512_setzero_ps(); __m512bh a = _mm512_cvtne2ps_pbh(f, f); f = _mm512_dpbf16_ps(f, a, a);' ;;
    amx) body='_tile_zero(0); _tile_dpbssd(0, 1, 2); _tile_dpbf16ps(0, 1, 2); _tile_release();' ;;
  esac
  printf '#include <immintrin.h>\nvoid probe() { %s }\nint main() { return 0; }\n' "$body"
}

# Sets EMITS: the tiers that the compiler takes, one blank around each. The probes run side by side.
ask_compiler() {
  local tier folder
  EMITS=" "
  [[ "$MACHINE_FAMILY" == x86 ]] || return 0
  folder="$(mktemp -d)"
  for tier in $TIERS; do
    (if compiles "$(tier_flags "$tier")" "$(tier_probe "$tier")" "${CXX_COMMAND[@]}"; then : >"$folder/$tier"; fi) &
  done
  wait
  for tier in $TIERS; do
    [[ ! -e "$folder/$tier" ]] || EMITS+="$tier "
  done
  rm -rf "$folder"
}

# cpu_runs <tier>: "yes", "unknown", or what is missing, of the lowest tier it builds on.
cpu_runs() {
  local need lacks="" base below
  if [[ "$MACHINE_FAMILY" != x86 ]]; then echo "no, not an x86 processor" && return; fi
  if [[ -z "$CPU_FLAGS" ]]; then echo "unknown" && return; fi
  base="$(tier_base "$1")"
  below=yes
  [[ -z "$base" ]] || below="$(cpu_runs "$base")"
  if [[ "$below" != yes ]]; then echo "$below" && return; fi
  for need in $(tier_needs "$1"); do
    [[ "$CPU_FLAGS" == *" $need "* ]] || lacks+=" $need"
  done
  if [[ -z "$lacks" ]]; then echo yes; else echo "no, lacks$lacks"; fi
}

print_tiers() {
  local tier emits
  ask_compiler
  say ""
  printf '%-13s %-18s %s\n' tier "compiler emits it" "this CPU runs it"
  printf '%-13s %-18s %s\n' generic yes yes
  for tier in $TIERS; do
    emits=no
    [[ "$EMITS" != *" $tier "* ]] || emits=yes
    printf '%-13s %-18s %s\n' "$tier" "$emits" "$(cpu_runs "$tier")"
  done
  print_machine_notes
}

print_machine_notes() {
  if [[ "$MACHINE_FAMILY" == arm ]]; then
    say "This is an ARM machine ($MACHINE): the generic tier is built and runs, correct but without vector kernels."
  elif [[ "$MACHINE_FAMILY" == other ]]; then
    say "This machine is $MACHINE, on which ktransformers is not tested: the generic tier will be built."
  elif [[ -z "$CPU_FLAGS" ]]; then
    say "Neither lscpu nor /proc/cpuinfo tells this CPU's features; the kernel asks the CPU itself when it runs."
  elif [[ "$(cpu_runs avx2)" != yes ]]; then
    say "This CPU $(cpu_runs avx2 | sed 's/^no, //'): the generic tier will run, correct but slow."
  fi
}

# The nearest folder that exists, for a path that may not exist yet.
existing_parent() {
  local path="$1"
  while [[ ! -e "$path" ]]; do path="$(dirname "$path")"; done
  printf '%s' "$path"
}

# Sets TORCH_VERSION (empty: to be installed). PyTorch and what it needs are most of what lands on the disk.
check_disk() {
  TORCH_VERSION=""
  [[ -n "${PYTHON_PATH:-}" ]] || return 0
  find_torch
  local folder free need=4
  [[ -z "$TORCH_VERSION" ]] || need=1
  folder="$(existing_parent "$VENV")"
  free="$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')" || free=""
  [[ "$free" =~ ^[0-9]+$ ]] || return 0
  if ((free < need * 1024 * 1024)); then
    miss "$folder has $((free / 1024)) MB of free disk; the installation needs $((need * 1024)) MB."
  fi
}
