"""What travels between the engine process and its client: msgpack over one ZeroMQ pair of sockets."""

from __future__ import annotations

from typing import Any

import msgspec

from dsv4.engine.protocol import GenerateRequest, RequestOutput


class Launch(msgspec.Struct):
    """First line on standard input."""

    address: str
    config: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    request: GenerateRequest


class Abort(msgspec.Struct, tag=True):
    request_id: str


class QueryStats(msgspec.Struct, tag=True):
    query_id: int


class Profile(msgspec.Struct, tag=True):
    """`start` or `stop` a trace; answered by a Reply."""

    query_id: int
    action: str


class Stop(msgspec.Struct, tag=True):
    """Finish what runs within `drain_seconds`, then end."""

    drain_seconds: float


class Progress(msgspec.Struct, tag=True):
    """One line about the start."""

    text: str


class Ready(msgspec.Struct, tag=True):
    """The engine takes requests. `facts` become part of the health report, such as `max_model_len`."""

    facts: dict[str, Any]


class StartFailed(msgspec.Struct, tag=True):
    message: str


class Outputs(msgspec.Struct, tag=True):
    outputs: list[RequestOutput]


class Reply(msgspec.Struct, tag=True):
    """Answer to QueryStats or Profile; `error` is a coded message."""

    query_id: int
    value: dict[str, Any]
    error: str | None = None


class Heartbeat(msgspec.Struct, tag=True):
    """Sent twice a second by the I/O loop, which runs even while a step does.

    `step_age` are the seconds since the last finished step while requests run, else 0. `idle_age` are those of them in
    which the step thread did not use the CPU. `observations` are histogram values since the last heartbeat.
    """

    step_age: float
    idle_age: float
    running: int
    waiting: int
    observations: list[tuple[str, float]]


ToEngine = Submit | Abort | QueryStats | Profile | Stop
FromEngine = Progress | Ready | StartFailed | Outputs | Reply | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
