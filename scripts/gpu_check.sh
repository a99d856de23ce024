#!/usr/bin/env bash
# All tests marked GPU in one command, under 10 minutes on 12 cores (with pytest-xdist), without network; the last line
# is a JSON record with hardware and versions: tests, kernels against references, lossless runs and exact mode,
# latencies, and the speedups that they imply.
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
  workers=$("$python" -c 'import os, xdist; print("-n", min(12, os.cpu_count()))' 2> /dev/null || true)
  # shellcheck disable=SC2086
  timeout 270 "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider $workers || status=failed
else
  status="not run"
fi
"$python" scripts/gpu_record.py "$status" "${where[@]}" --seconds 220
