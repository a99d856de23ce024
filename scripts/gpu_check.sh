#!/usr/bin/env bash
# Everything marked GPU in one command, under 10 minutes, without network; the last line is a JSON record with hardware
# and versions: tests, kernels against references, lossless runs and exact mode, latencies and what they imply.
# usage: scripts/gpu_check.sh [PYTHON]   (an interpreter with torch, transformers and this package's other needs)
#        scripts/gpu_check.sh --cpu [PYTHON]   all of it small, without a GPU: kernels run in Triton's interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
where=()
if [ "${1:-}" = "--cpu" ]; then where=(--cpu); shift; fi
python=${1:-python3}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
status=passed
if [ ${#where[@]} -eq 0 ]; then
  timeout 150 "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider || status=failed
else
  status="not run"
fi
"$python" scripts/gpu_record.py "$status" "${where[@]}" --seconds 330
