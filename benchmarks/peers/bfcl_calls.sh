#!/usr/bin/env bash
# Functions of the Berkeley Function Calling Leaderboard through `tool_choice: required`: every call must parse and fit
# its schema. Run by `make peers`, outside CI. Of bfcl-eval only the questions are used, so it comes without what it needs.
# BFCL_COUNT: questions (60).
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=build/peers/bfcl

if [ ! -x "$tool/bin/python" ]; then
    echo "Installing bfcl-eval (its data alone) and jsonschema into $tool"
    "${PYTHON:-python3}" -m venv "$tool"
    "$tool/bin/pip" --disable-pip-version-check install --quiet "jsonschema==4.26.0"
    "$tool/bin/pip" --disable-pip-version-check install --quiet --no-deps "bfcl-eval==2026.3.23"
fi
data=$(echo "$tool"/lib/python*/site-packages/bfcl_eval/data)
"$tool/bin/python" benchmarks/peers/bfcl_calls.py --data "$data" --lowlat "${VENV:-.venv}/bin/lowlat" \
    --count "${BFCL_COUNT:-60}" "$@"
