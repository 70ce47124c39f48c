"""What the doctor is asked to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NPU_BACKENDS = frozenset({"npu", "torch-npu"})


@dataclass(frozen=True)
class DoctorOptions:
    """The planned deployment.

    Attributes:
        model: checkpoint directory; None leaves the checkpoint checks out.
        backend: as of `dsv4 serve --backend`; `auto` means NPUs where there are any.
        devices: device numbers that will be used.
        host, ports: where the server will listen.
        cache_directory: where converted models, compiled kernels and the backend directory are kept.
    """

    model: Path | None = None
    backend: str = "auto"
    devices: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (8225, 8000, 8001, 8002)
    cache_directory: Path | None = None
