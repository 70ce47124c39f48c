"""The project's error classes. A request error carries a stable code that survives every transport."""

from __future__ import annotations

import enum
import re

_CODED = re.compile(r"\[(?P<code>[A-Z_]+)(?: (?P<detail>-?\d+))?\] ?(?P<text>.*)", re.DOTALL)


class ErrorCode(enum.Enum):
    """Stable machine-readable codes. Triton turns every model error into HTTP 400, so the code leads the message."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNSUPPORTED = "UNSUPPORTED"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE = "DEADLINE"
    ABORTED = "ABORTED"
    ENGINE_DEAD = "ENGINE_DEAD"
    DEVICE_ERROR = "DEVICE_ERROR"
    DRAINING = "DRAINING"
    INTERNAL = "INTERNAL"

    @property
    def http_status(self) -> int:
        """HTTP status that the proxy answers with for this code."""
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.DEADLINE: 504,
    ErrorCode.ABORTED: 499,
    ErrorCode.ENGINE_DEAD: 503,
    ErrorCode.DEVICE_ERROR: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.INTERNAL: 500,
}


class Dsv4Error(Exception):
    """Base of all errors raised on purpose by this project."""


class ConfigurationError(Dsv4Error):
    """A flag, config.json or engine.json is wrong. The message names the field and the remedy."""


class CheckpointError(Dsv4Error):
    """A checkpoint cannot be used. The message names the file and the tensor."""


class EngineStartError(Dsv4Error):
    """The engine could not start. The message is the engine's own reason."""


class RequestError(Dsv4Error):
    """One request fails; the server goes on.

    ``field`` is the JSON path or tensor name at fault (``messages[2].content``), None when no field is to blame.
    ``detail`` is a number belonging to the code, such as an ACL error number for DEVICE_ERROR.
    """

    def __init__(self, code: ErrorCode, message: str, *, field: str | None = None, detail: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.detail = detail

    def __str__(self) -> str:
        detail = "" if self.detail is None else f" {self.detail}"
        return f"[{self.code.value}{detail}] {self.message}"

    @classmethod
    def parse(cls, text: str) -> RequestError:
        """Read an error back from text such as ``in ensemble 'x', [QUEUE_FULL] 512 requests wait``.

        Text without a known code becomes INTERNAL.
        """
        for match in _CODED.finditer(text):
            code = ErrorCode.__members__.get(match["code"])
            if code is not None:
                return cls(code, match["text"], detail=int(match["detail"]) if match["detail"] else None)
        return cls(ErrorCode.INTERNAL, text)


def invalid_argument(field: str, message: str) -> RequestError:
    """INVALID_ARGUMENT whose message starts with the field's name."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{field}: {message}", field=field)
