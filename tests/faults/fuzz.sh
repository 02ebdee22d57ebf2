#!/usr/bin/env bash
# Schemathesis against the server's own OpenAPI description: no 500, and no answer that the description does not know.
# Run by `make fuzz`, outside CI. FUZZ_EXAMPLES: test cases an operation (200). FUZZ_SEED: for a repeat.
# Left out: positive_data_acceptance. The description cannot say all that a server refuses, such as a prompt that is
# longer than the model's context or a bias for a token that it does not have.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${VENV:-.venv}/bin/python
tool=build/peers/schemathesis

if [ ! -x "$tool/bin/st" ]; then
    echo "Installing schemathesis into $tool"
    "${PYTHON:-python3}" -m venv "$tool"
    "$tool/bin/pip" --disable-pip-version-check install --quiet "schemathesis==4.32.5"
fi

folder=$(mktemp -d)
OMP_NUM_THREADS=1 "$python" tests/faults/simulated_serve.py >"$folder/address" 2>"$folder/log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$folder"' EXIT
for _ in $(seq 600); do
    [ -s "$folder/address" ] && break
    kill -0 $server 2>/dev/null || { cat "$folder/log"; exit 1; }
    sleep 0.1
done
address=$(cat "$folder/address")

here=$PWD
(
    cd "$folder" # it leaves its notes where it runs
    "$here/$tool/bin/st" run "$address/openapi.json" --exclude-checks positive_data_acceptance \
        --max-examples "${FUZZ_EXAMPLES:-200}" --seed "${FUZZ_SEED:-1}" --continue-on-failure --suppress-health-check all \
        --request-timeout 30 --warnings off
)
if grep -E '"internal_error"|"engine_ended"' "$folder/log"; then
    echo "the server's log tells of errors"
    exit 1
fi
"$python" -c "
import sys, urllib.request
body = b'{\"prompt\": \"ab\", \"max_tokens\": 2}'
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1] + '/v1/completions', body), timeout=10)
sys.exit(answer.status != 200)" "$address"
echo "the server still serves"
