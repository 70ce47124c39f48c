#!/usr/bin/env bash
# Sets CANN's environment where the image has CANN, then becomes `dsv4` with the container's arguments.
set -euo pipefail

for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -r "$script" ]; then
        set +u
        # shellcheck disable=SC1090  # belongs to the base image
        source "$script"
        set -u
    fi
done

# The driver belongs to the host and is mounted into the container.
driver=/usr/local/Ascend/driver/lib64
if [ -d "$driver" ]; then
    export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

exec dsv4 "$@"
