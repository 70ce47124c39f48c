"""Checkpoint files: tensor names, a strict safetensors reader, and the weights of the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.checkpoint.weights import ModelWeights, load_weights

__all__ = ["ModelWeights", "load_weights"]


def __getattr__(name: str) -> Any:
    # Imported on first use: reading headers and names must not cost an import of torch.
    if name in __all__:
        from dsv4.checkpoint import weights

        return getattr(weights, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
