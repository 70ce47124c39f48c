"""A replica as a balancer sees it: readiness, requests that wait for a slot, streams that last, gRPC beside HTTP.

Run as a process so that it can be killed: `python -m tests.integration.stand_in_replica NAME HTTP_PORT GRPC_PORT`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tritonclient.grpc import service_pb2

SLOTS = 2
TICK_SECONDS = 0.02


@dataclass
class Replica:
    """Serves at most `SLOTS` requests at once; others wait without a byte sent, as in an engine's queue."""

    name: str
    ready: bool = True
    started: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"replica": self.name, "started": self.started}, 200 if self.ready else 503)

    async def control(self, request: Request) -> Response:
        self.ready = (await request.json())["ready"]
        return JSONResponse({})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if body.get("refuse"):
            return JSONResponse({"error": {"message": "queue full"}}, 429)
        await self.slots.acquire()
        self.started += 1
        return StreamingResponse(self._ticks(body), media_type="text/event-stream")

    async def _ticks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        try:
            for tick in range(body["ticks"]):
                yield f"data: {json.dumps({'replica': self.name, 'tick': tick})}\n\n"
                await asyncio.sleep(TICK_SECONDS)
            yield "data: [DONE]\n\n"
        finally:
            self.slots.release()


def grpc_server(replica: Replica, port: int) -> grpc.aio.Server:
    """Triton's `ServerMetadata`, whose name tells which replica answered."""

    async def metadata(request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name=replica.name)

    handlers = {
        "ServerMetadata": grpc.unary_unary_rpc_method_handler(
            metadata,
            request_deserializer=service_pb2.ServerMetadataRequest.FromString,
            response_serializer=service_pb2.ServerMetadataResponse.SerializeToString,
        )
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    return server


async def main(name: str, http_port: int, grpc_port: int) -> None:
    replica = Replica(name)
    app = Starlette(
        routes=[
            Route("/health/ready", replica.health),
            Route("/control", replica.control, methods=["POST"]),
            Route("/v1/completions", replica.complete, methods=["POST"]),
        ]
    )
    server = grpc_server(replica, grpc_port)
    await server.start()
    config = uvicorn.Config(app, host="127.0.0.1", port=http_port, log_level="warning")
    await uvicorn.Server(config).serve()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
