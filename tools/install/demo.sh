# The main job on the model that ships.

readonly DEMO_COMMAND=(
  kt run demo/model --rules Qwen3MoE.yaml --backend INT8
  --prompt "It was a fine morning" --max-new-tokens 120 --temperature 0.7 --seed 1
)

run_demo() {
  local model="$KT_ROOT/demo/model"
  if [[ ! -f "$model/config.json" ]]; then
    say "demo/model is missing: this copy of the sources is incomplete, unpack the archive again" >&2
    exit 1
  fi
  say ""
  say "$ $(quoted "${DEMO_COMMAND[@]}")"
  (cd "$KT_ROOT" && "$VENV/bin/${DEMO_COMMAND[0]}" "${DEMO_COMMAND[@]:1}")
}
