#!/usr/bin/env bash
# Installs dsv4-triton into a virtual environment: used by `make setup` and by the image, so both are the same path.
# usage: install.sh PYTHON VENV TORCH_REQUIREMENT [EXTRAS]
set -euo pipefail

python=$1 venv=$2 torch=$3 extras=${4:-}
root=$(cd "$(dirname "$0")/.." && pwd)

"$python" - <<'CHECK'
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"dsv4-triton needs Python 3.10 to 3.12 (Triton's Python backend does not work with {sys.version.split()[0]})")
CHECK

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

echo "installing $torch, dsv4-triton and tritonserver into $venv: about 3 minutes and 2.5 GB the first time"

# torch first and by itself: a later unpinned requirement is then already satisfied and no other build is pulled in.
# shellcheck disable=SC2086  # the requirement may carry an --index-url
"${pip[@]}" $torch
"${pip[@]}" --editable "$root${extras:+[$extras]}"
# xgrammar requires the GPU compiler `triton` on x86-64 Linux, hundreds of megabytes that a grammar has no use for.
"${pip[@]}" --no-deps "xgrammar>=0.2,<0.3"
# The wheel is only the carrier of the tritonserver binary and the Python backend; its web server and tools are not used.
"${pip[@]}" --no-deps "nvidia-pytriton>=0.7,<0.8"
