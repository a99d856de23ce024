#!/usr/bin/env bash
# Regenerate and train on a machine without network, in calls of under ten minutes, each of which resumes the last one.
# Needs an interpreter with this package's dependencies; nothing is downloaded.
#
#   scripts/train_on_gpu.sh split FILE DIR                 split a model file into pieces under 60 MB
#   scripts/train_on_gpu.sh join DIR FILE                  join the pieces and check the file
#   scripts/train_on_gpu.sh run METHOD MODEL PROMPTS WORK OUT [SECTION.FIELD=VALUE ...]
#
# run: MODEL is a folder or GGUF file; WORK keeps answers and states between calls; OUT gets the results, in files under
# 16 MB: answers.tar.*, drafter.tar.* (cat them together, then tar -x), log.jsonl
# and provenance.json. The last line of output is JSON: "stage" is "answers", "training" or "done"; call again until done.
# Environment: PYTHON (python3), SECONDS_PER_CALL (540), PROCESSES (1; more train on as many GPUs), ANSWER_BATCH (256).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TQDM_DISABLE=1

usage() { sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }

split_file() { # FILE DIR
  mkdir -p "$2"
  split --bytes=56M --suffix-length=3 --numeric-suffixes "$1" "$2/$(basename "$1").piece-"
  (cd "$(dirname "$1")" && sha256sum "$(basename "$1")") > "$2/sha256"
}

join_file() { # DIR FILE
  cat "$1"/*.piece-* > "$2.unfinished"
  [ "$(sha256sum < "$2.unfinished" | cut -d' ' -f1)" = "$(cut -d' ' -f1 "$1/sha256")" ] ||
    { echo "error: $1: the pieces do not make the file that was split; is one missing?" >&2; exit 2; }
  mv "$2.unfinished" "$2"
}

left() { echo $((deadline - $(date +%s))); }

# Interrupt, not kill, a command at the deadline, so that finished work is stored. Status 124: time is up.
limited() {
  [ "$(left)" -gt 20 ] || return 124
  timeout --signal=INT --kill-after=30 "$(left)" "$@"
}

pack() { # NAME FOLDER: an archive in pieces
  tar -C "$(dirname "$2")" -cf - "$(basename "$2")" | split --bytes=15M --suffix-length=2 --numeric-suffixes - "$out/$1.tar."
}

finish() { # STAGE
  rm -f "$out"/answers.tar.* "$out"/drafter.tar.*
  [ -d "$work/answers" ] && pack answers "$work/answers"
  [ -d "$work/run/drafter" ] && pack drafter "$work/run/drafter"
  for file in log.jsonl provenance.json; do
    if [ -f "$work/run/$file" ]; then cp "$work/run/$file" "$out/"; fi
  done
  echo "{\"stage\": \"$1\", \"seconds\": $(($(date +%s) - started))}"
  exit 0
}

run() { # METHOD MODEL PROMPTS WORK OUT [SETTINGS ...]
  [ $# -ge 5 ] || usage
  method=$1 model=$2 prompts=$3 work=$4 out=$5
  shift 5
  started=$(date +%s) deadline=$(($(date +%s) + ${SECONDS_PER_CALL:-540}))
  mkdir -p "$work" "$out"
  code=0
  if [ ! -f "$work/answered" ]; then
    limited "$python" -m outpace train regenerate --target "$model" --prompts "$prompts" --out "$work/answers" \
      --max-new-tokens "${MAX_NEW_TOKENS:-512}" --batch-size "${ANSWER_BATCH:-256}" || code=$?
    case $code in 0) touch "$work/answered" ;; 124 | 130) finish answers ;; *) exit "$code" ;; esac
  fi
  launch=("$python" -m outpace)
  if [ "${PROCESSES:-1}" -gt 1 ]; then
    launch=("$python" -m accelerate.commands.launch --multi_gpu --num_processes "$PROCESSES" -m outpace)
  fi
  limited "${launch[@]}" train "$method" --target "$model" --prompts "$prompts" --answers "$work/answers" \
    --out "$work/run" training.save_every=50 "$@" || code=$?
  case $code in 0) finish done ;; 124 | 130) finish training ;; *) exit "$code" ;; esac
}

case ${1:-} in
  split) [ $# -eq 3 ] || usage; split_file "$2" "$3" ;;
  join) [ $# -eq 3 ] || usage; join_file "$2" "$3" ;;
  run) shift; run "$@" ;;
  *) usage ;;
esac
