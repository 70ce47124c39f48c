"""Tokens straight from Triton over gRPC: one stream a request; closing it cancels the request."""

import json
import os
import queue

import numpy as np
import tritonclient.grpc as triton

responses: queue.Queue = queue.Queue()
client = triton.InferenceServerClient(os.environ.get("TRITON_GRPC", "127.0.0.1:8001"))
client.start_stream(lambda result, error: responses.put((result, error)))


def tensor(name: str, datatype: str, value: object) -> triton.InferInput:
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=np.object_ if datatype == "BYTES" else np.bool_))
    return made


client.async_stream_infer(
    "deepseek_v4",
    [
        tensor("text_input", "BYTES", b"Huawei is"),
        tensor("stream", "BOOL", True),
        tensor("sampling_parameters", "BYTES", json.dumps({"max_tokens": 20}).encode()),
        tensor("return_finish_reason", "BOOL", True),
    ],
)
while True:
    result, error = responses.get(timeout=60)
    if error is not None:
        raise SystemExit(f"failed: {error}")
    print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    reason = result.as_numpy("finish_reason")[0].decode()
    if reason != "None":
        print(f"\nfinish reason: {reason}")
        break
client.stop_stream(cancel_requests=True)
