"""A tool round trip: the model calls a function, gets its result, and answers."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8225/v1"), api_key="none")
model = client.models.list().data[0].id


def get_weather(location: str) -> str:
    return json.dumps({"location": location, "temperature": 7, "condition": "light rain"})


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "description": "The city name"}},
                "required": ["location"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Hangzhou?"}]
while True:
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=128)
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    # The whole message goes back, with its reasoning: the model sees what it thought before the call.
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        print(f"call: {call.function.name}({call.function.arguments})")
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
