"""DeepSeek V4 checkpoint tools: source to W8A8, W8A8 to sidecar, verification."""

from dsv4_converter.convert import ConversionSummary, convert
from dsv4_converter.prepack import PrepackSummary, prepack
from dsv4_converter.progress import ProgressEvent
from dsv4_converter.shard import ConversionCancelledError
from dsv4_converter.verify import VerificationReport, verify

__all__ = [
    "ConversionCancelledError",
    "ConversionSummary",
    "PrepackSummary",
    "ProgressEvent",
    "VerificationReport",
    "convert",
    "prepack",
    "verify",
]
