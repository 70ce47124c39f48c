"""Triton's generate endpoints over plain HTTP, whole and streamed."""

import json
import os

import httpx

url = os.environ.get("TRITON_HTTP", "http://127.0.0.1:8000") + "/v2/models/deepseek_v4"
body = {"text_input": "Huawei is", "sampling_parameters": json.dumps({"max_tokens": 20})}

with httpx.Client(trust_env=False, timeout=60) as client:
    whole = client.post(f"{url}/generate", json={**body, "exclude_input_in_output": True})
    print("whole:   ", whole.json()["text_output"])

    print("streamed:", end=" ")
    with client.stream("POST", f"{url}/generate_stream", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:  # the status was sent before the error could happen
                    raise SystemExit(event["error"])
                print(event["text_output"], end="", flush=True)
    print()
