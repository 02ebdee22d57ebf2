#!/usr/bin/env bash
# Other people's load generators against our scripted server and against lowlat. Run by `make peers`, outside CI.
# Each tool gets an environment of its own under build/peers. AgentX traces are taken from $LOWLAT_DATA/traces/agentx.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${VENV:-.venv}/bin/python

environment() { # name, package
    if [ ! -x "build/peers/$1/bin/$1" ]; then
        echo "Installing $2 into build/peers/$1"
        "${PYTHON:-python3}" -m venv "build/peers/$1"
        "build/peers/$1/bin/pip" --disable-pip-version-check install --quiet "$2"
    fi
}

environment aiperf "aiperf==0.13.0"
"$python" benchmarks/peers/load_agreement.py --aiperf build/peers/aiperf/bin/aiperf

if [ -d "${LOWLAT_DATA:-/nonexistent}/traces/agentx" ]; then
    environment agentx "agentx-harness==1.0.12"
    "$python" benchmarks/peers/agentx_drive.py --agentx build/peers/agentx/bin/agentx --traces "$LOWLAT_DATA/traces/agentx"
else
    echo "agentx-harness is skipped: set LOWLAT_DATA to the folder that holds traces/agentx"
fi
