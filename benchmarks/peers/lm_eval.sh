#!/usr/bin/env bash
# lm-eval, unchanged, against `lowlat serve`; its log-likelihoods against transformers, its choices against /v1/score. Run by `make peers`, outside CI.
# It gets an environment of its own under build/peers. Nothing is loaded from a hub.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ ! -x build/peers/lm-eval/bin/lm_eval ]; then
    echo "Installing lm-eval into build/peers/lm-eval"
    "${PYTHON:-python3}" -m venv build/peers/lm-eval
    build/peers/lm-eval/bin/pip --disable-pip-version-check install --quiet "lm-eval[api]==0.4.13" "transformers==5.24.0"
fi
for script in lm_eval_agreement score_choices; do
    "${VENV:-.venv}/bin/python" "benchmarks/peers/$script.py" --lm-eval build/peers/lm-eval/bin/lm_eval "$@"
done
