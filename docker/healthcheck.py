"""Exit status 0 when the proxy in this container would serve a request (`DSV4_HEALTH_URL` names another address)."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

DEFAULT_URL = "http://127.0.0.1:8225/health/ready"


def main() -> int:
    """Ask the readiness endpoint once, without any proxy of the environment."""
    url = os.environ.get("DSV4_HEALTH_URL", DEFAULT_URL)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=4) as response:
            return 0 if response.status == 200 else 1
    except (urllib.error.URLError, OSError, ValueError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
