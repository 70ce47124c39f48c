"""The Python stub starts three processes before the engine runs; none of them may load the network's libraries."""

from __future__ import annotations

import subprocess
import sys


def test_the_stub_does_not_import_torch() -> None:
    code = (
        "import sys, dsv4.triton.models\n"
        "print(*(name for name in ('torch', 'numba', 'transformers', 'xgrammar') if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
