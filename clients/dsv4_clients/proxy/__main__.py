"""`python -m dsv4_clients.proxy`."""

from __future__ import annotations

import sys

from dsv4.errors import Dsv4Error

from dsv4_clients.proxy.server import run_proxy
from dsv4_clients.proxy.settings import read_settings

if __name__ == "__main__":
    try:
        run_proxy(read_settings())
    except Dsv4Error as error:
        sys.stderr.write(f"dsv4 proxy: error: {error}\n")
        sys.exit(1)
