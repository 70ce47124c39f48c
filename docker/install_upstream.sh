#!/usr/bin/env bash
# Installs upstream's PyPTO packages from a local directory into the virtual environment; nothing to do when it has none.
# They are never asked from a package index: PyPI's `pypto` and `simpler` are other projects.
# usage: install_upstream.sh VENV DIRECTORY
set -euo pipefail

venv=$1 directory=$2
shopt -s nullglob

wheels=("$directory"/wheels/*.whl)
if [ "${#wheels[@]}" -gt 0 ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "${wheels[@]}"
fi

if [ -d "$directory/pypto-serving/pypto_serving" ]; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$directory/pypto-serving" >"$site/pypto-serving.pth"
    "$venv/bin/python" -c 'import pypto_serving; print("pypto_serving from", pypto_serving.__file__)'
fi
