#!/usr/bin/env bash
# Installs what the image needs from the distribution (Debian 12 or Ubuntu 22.04 and later); root only.
# usage: install_system.sh [MORE PACKAGES ...]
set -euo pipefail

usable_python() {
    python3 - <<'CHECK'
import sys
try:
    import ensurepip, venv
except ImportError:
    sys.exit(1)
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
CHECK
}

# tini reaps zombies and forwards signals as process 1.
packages=(ca-certificates tini)

# A CANN image brings its own Python, which must not be shadowed. Elsewhere the distribution's is used, with the
# shared library that Triton's Python stub is linked to.
export DEBIAN_FRONTEND=noninteractive
apt-get update
if ! usable_python 2>/dev/null; then
    # The meta package names the versioned one: python3 -> python3.11 -> libpython3.11.
    versioned=$(apt-cache depends python3 | sed -n 's/^ *Depends: \(python3\.[0-9]*\)$/\1/p' | head -n 1)
    packages+=(python3 python3-venv "lib${versioned:?no python3 in this distribution}")
fi
apt-get install --yes --no-install-recommends "${packages[@]}" "$@"
rm -rf /var/lib/apt/lists/*
