#!/usr/bin/env bash
# The SGLang adapter of lowlat-plugin against the real wheel of sglang 0.5.23, which is put beside this environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python tests/plugin/sglang_site.py
.venv/bin/python -m pytest tests/plugin/test_plugin_sglang.py
