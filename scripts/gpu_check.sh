#!/usr/bin/env bash
# Everything marked GPU in one command, under 10 minutes; the last line is a JSON record with hardware and versions.
# usage: scripts/gpu_check.sh [PYTHON]   (an interpreter with torch, transformers and this package's other needs)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
status=passed
"$python" -m pytest -m gpu tests/gpu -p no:cacheprovider || status=failed
"$python" scripts/gpu_record.py "$status"
