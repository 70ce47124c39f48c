"""The DeepSeek V4 network in PyTorch: float reference and W8A8 numerics, from position-addressed caches."""

from dsv4.config import Numerics
from dsv4.model.batch import ForwardBatch
from dsv4.model.cache_pools import CachePools, block_bytes
from dsv4.model.transformer import DeepseekV4Model

__all__ = ["CachePools", "DeepseekV4Model", "ForwardBatch", "Numerics", "block_bytes"]
