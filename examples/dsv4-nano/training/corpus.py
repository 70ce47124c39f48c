"""The training text: OpenAI-style chats and raw texts, made deterministically from a seed.

Prompts are rendered by the product's own encoder (`dsv4.chat`), so the model is trained on exactly what a server sends.
The split `held-out` uses other cities, sums, phrasings, invented words and filler, but the same kinds of tasks.
"""

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dsv4.chat import encode_chat
from questions import QUESTIONS
from texts import STORIES, STORY_REQUESTS, TEXTS
from vocabulary import CITIES, CODE_WORDS, COLORS, HELD_OUT_CITIES, NAMES, PETS, POLICY, SYLLABLES

BOS, EOS, DSML = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "｜DSML｜"
REVISION = "preview"

WEIGHTS = {
    "raw_text": 1.4,
    "arithmetic": 1.8,
    "project": 2.6,
    "story": 0.6,
    "structured": 0.7,
    "weather": 1.1,
    "other_tool": 0.6,
    "no_tool": 0.3,
    "recall": 1.9,
    "repetition": 1.0,
    "small_sums": 0.0,
}
"""How often each kind of sample is drawn, by the name of the method of `Corpus` that makes it."""


@dataclass
class Sample:
    """One training sequence.  `request` is the chat request of its last turn (None for raw text)."""

    kind: str
    text: str
    request: dict[str, Any] | None = None
    reply: str = ""
    checks: list[str] = field(default_factory=list)


@dataclass
class Conversation:
    """A chat under construction; `finish` renders it with its last assistant message as the reply."""

    kind: str
    thinking: bool
    request: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    def system(self, content: str) -> None:
        self.messages.append({"role": "system", "content": content})

    def user(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def assistant(self, reasoning: str, content: str) -> None:
        self.messages.append({"role": "assistant", "reasoning_content": reasoning, "content": content})

    def call(self, reasoning: str, name: str, arguments: dict[str, Any]) -> None:
        self.calls += 1
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"call_{self.calls}", "type": "function", "function": function}
        message = {"role": "assistant", "reasoning_content": reasoning, "content": "", "tool_calls": [call]}
        self.messages.append(message)

    def result(self, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": f"call_{self.calls}", "content": content})

    def finish(self) -> Sample:
        *history, last = self.messages
        request = {**self.request, "messages": history}
        reply = reply_text(last, self.thinking)
        text = encode_chat(request, revision=REVISION).prompt + reply + EOS
        return Sample(self.kind, text, request, reply)


def reply_text(message: dict[str, Any], thinking: bool) -> str:
    """What the model has to write for an assistant message, in DeepSeek V4's output grammar, without EOS."""
    text = f"{message['reasoning_content']}</think>" if thinking else ""
    text += message["content"]
    calls = message.get("tool_calls")
    if not calls:
        return text
    text += f"\n\n<{DSML}tool_calls>\n"
    for call in calls:
        text += f'<{DSML}invoke name="{call["function"]["name"]}">\n'
        for name, value in json.loads(call["function"]["arguments"]).items():
            is_string = isinstance(value, str)
            written = value if is_string else json.dumps(value, ensure_ascii=False)
            text += f'<{DSML}parameter name="{name}" string="{json.dumps(is_string)}">{written}</{DSML}parameter>\n'
        text += f"</{DSML}invoke>\n"
    return text + f"</{DSML}tool_calls>"


class Corpus:
    """An endless stream of samples of one split (`train` or `held-out`)."""

    def __init__(
        self,
        seed: int,
        split: str = "train",
        emphasis: dict[str, float] | None = None,
        invented_cities: float = 0.2,
    ) -> None:
        """`emphasis` replaces the weights of some kinds, by the name of their method.

        `invented_cities` is the share of cities that are made up, so that they can only be copied.
        """
        self.invented_cities = invented_cities
        self.random = random.Random(f"{seed}/{split}")
        self.held_out = split == "held-out"
        self.weights = WEIGHTS | (emphasis or {})

    def __iter__(self) -> Iterator[Sample]:
        makers = [getattr(self, name) for name in self.weights]
        weights = list(self.weights.values())
        while True:
            yield self.random.choices(makers, weights)[0]()

    # -- building blocks ----------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def start(self, kind: str, system: float = 0.35, thinking: float = 0.4) -> Conversation:
        """An empty conversation, in chat or thinking mode, perhaps with an ordinary system prompt."""
        request: dict[str, Any] = {}
        is_thinking = self.chance(thinking)
        if is_thinking:
            request["reasoning_effort"] = "max" if self.chance(0.04) else "high"
        conversation = Conversation(kind, is_thinking, request)
        if self.chance(system):
            conversation.system(self.random.choice(["You are a helpful assistant."] * 3 + POLICY[:6]))
        return conversation

    def city(self) -> str:
        if self.held_out:
            return self.random.choice(HELD_OUT_CITIES)
        return self.invented_word() if self.chance(self.invented_cities) else self.random.choice(CITIES)

    def invented_word(self) -> str:
        """A name that no text contains, so that it can only be copied."""
        word = "".join(self.random.choices(SYLLABLES, k=self.random.randint(2, 3)))
        return (word + self.random.choice(["", "n", "r", "s", "l"])).capitalize()

    def sum_exchange(self) -> tuple[str, str, str]:
        """A question about a small sum with its reasoning and answer."""
        while True:
            sign, word, name = self.random.choice(
                [("+", "plus", "sum")] * 3 + [("-", "minus", "difference"), ("*", "times", "product")]
            )
            limit = 10 if sign == "*" else 20
            a, b = self.random.randint(0, limit), self.random.randint(0, limit)
            if self.chance(0.4):
                a, b = a % 10, b % 10
            if sign == "-" and a < b:
                a, b = b, a
            result = a + b if sign == "+" else a - b if sign == "-" else a * b
            reserved = max(a, b) > 9 and zlib.crc32(f"{a}{sign}{b}".encode()) % 12 == 0
            if reserved == self.held_out:
                break
        forms = ["What is {a}{s}{b}?"] * 3 + [
            "What is {a} {s} {b}?",
            "{a}{s}{b}=?",
            "Calculate {a} {w} {b}.",
            "How much is {a} {w} {b}?",
            "What is {a} {w} {b}?",
            "Compute {a}{s}{b}.",
        ]
        question = self.random.choice(forms).format(a=a, b=b, s=sign, w=word)
        reasoning = f"The user wants the {name} of {a} and {b}. {a} {word} {b} is {result}."
        return question, reasoning, f"{a}{sign}{b} = {result}."

    def project_exchange(self) -> tuple[str, str, str]:
        """A question from `QUESTIONS`; the last phrasing of each is held out."""
        phrasings, reasoning, answer = self.random.choice(QUESTIONS)
        question = phrasings[-1] if self.held_out else self.random.choice(phrasings[:-1])
        return question, reasoning, answer

    def small_talk(self, conversation: Conversation, exchanges: int) -> None:
        for _ in range(exchanges):
            question, reasoning, answer = self.sum_exchange() if self.chance(0.4) else self.project_exchange()
            conversation.user(question)
            conversation.assistant(reasoning, answer)

    # -- kinds of samples ---------------------------------------------------------------------------------------

    def raw_text(self) -> Sample:
        """A text without chat markup, as completion requests send it: with or without BOS, or cut at its start."""
        text = self.random.choice(TEXTS + list(STORIES.values()))
        if self.chance(0.25):
            text = " ".join(text.split(". ")[1:]) or text
        text = (BOS if self.chance(0.4) else "") + text + EOS
        return Sample("text", text)

    def arithmetic(self) -> Sample:
        conversation = self.start("arithmetic")
        for _ in range(self.random.choice([1, 1, 2, 4, 6])):
            question, reasoning, answer = self.sum_exchange()
            conversation.user(question)
            conversation.assistant(reasoning, answer)
        return conversation.finish()

    def small_sums(self) -> Sample:
        """A row of sums of two digits, the ones that everybody asks first."""
        conversation = self.start("small sums", thinking=0.3)
        signs = [("+", "plus", "sum")] * 4 + [("-", "minus", "difference"), ("*", "times", "product")]
        for _ in range(self.random.choice([1, 3, 5, 8])):
            sign, word, name = self.random.choice(signs)
            a, b = self.random.randint(0, 9), self.random.randint(0, 9)
            if self.chance(0.12):
                a = b = self.random.randint(1, 3)
            if sign == "-":
                a, b = max(a, b), min(a, b)
            result = a + b if sign == "+" else a - b if sign == "-" else a * b
            forms = ["What is {a}{s}{b}?", "What is {a} {s} {b}?", "How much is {a} {w} {b}?", "{a}{s}{b}=?"]
            conversation.user(self.random.choice(forms).format(a=a, b=b, s=sign, w=word))
            reasoning = f"The user wants the {name} of {a} and {b}. {a} {word} {b} is {result}."
            conversation.assistant(reasoning, f"{a}{sign}{b} = {result}.")
        return conversation.finish()

    def project(self) -> Sample:
        conversation = self.start("project")
        self.small_talk(conversation, self.random.choice([0, 0, 0, 1, 2]))
        for _ in range(self.random.choice([1, 1, 2, 3])):
            question, reasoning, answer = self.project_exchange()
            conversation.user(question)
            conversation.assistant(reasoning, answer)
        return conversation.finish()

    def story(self) -> Sample:
        conversation = self.start("story")
        topic, text = self.random.choice(list(STORIES.items()))
        request = STORY_REQUESTS[-1] if self.held_out else self.random.choice(STORY_REQUESTS[:-1])
        conversation.user(request.format(topic=topic))
        conversation.assistant(f"The user wants a story about a {topic}. I tell one.", text)
        return conversation.finish()

    def structured(self) -> Sample:
        """Short answers in JSON, filled with values from the question."""
        conversation = self.start("json")
        if self.chance(0.3):
            conversation.request["response_format"] = {"type": "json_object"}
        for _ in range(self.random.choice([1, 2])):
            name = self.random.choice(NAMES) if self.chance(0.6) and not self.held_out else self.invented_word()
            if self.chance(0.5):
                age = self.random.randint(11, 89)
                question = f"Reply in JSON with name and age: {name} is {age} years old."
                answer = {"name": name, "age": age}
            else:
                city = self.city()
                question = f"Reply in JSON with name and city: {name} lives in {city}."
                answer = {"name": name, "city": city}
            conversation.user(question)
            conversation.assistant("The user wants JSON. I copy the values.", json.dumps(answer))
        return conversation.finish()

    def repetition(self) -> Sample:
        """Lists to be copied, at once or later: dense practice of looking back, on which most other tasks rest."""
        conversation = self.start("repetition", system=0.2, thinking=0.1)
        sources = [CODE_WORDS, NAMES, CITIES, COLORS, PETS]
        for _ in range(self.random.choice([1, 1, 2])):
            items = []
            for _ in range(self.random.randint(3, 20)):
                if self.chance(0.3):
                    items.append(str(self.random.randint(0, 999)))
                elif self.chance(0.3) or self.held_out:
                    items.append(self.invented_word())
                else:
                    items.append(self.random.choice(self.random.choice(sources)))
            words = " ".join(items)
            if self.chance(0.6):
                conversation.user(
                    self.random.choice(["Repeat after me: {w}", "Repeat: {w}", "Say {w}"]).format(w=words)
                )
            else:
                conversation.user(f"Remember these words: {words}")
                conversation.assistant("The user gives me words.", "I will remember them.")
                self.small_talk(conversation, self.random.choice([0, 0, 1, 2, 4]))
                conversation.user("Repeat the words.")
            conversation.assistant("I copy the words.", words)
        return conversation.finish()

    def weather_tool(self) -> dict[str, Any]:
        location: dict[str, Any] = {"type": "string"}
        if self.chance(0.7):
            location["description"] = self.random.choice(
                ["The city name", "City name", "The city and state, e.g. San Francisco, CA", "The name of the city"]
            )
        properties = {"location": location}
        if self.chance(0.35):
            properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self.chance(0.8):
            parameters["required"] = ["location"]
        function: dict[str, Any] = {"name": "get_weather"}
        if self.chance(0.85):
            function["description"] = self.random.choice(
                [
                    "Get the current weather",
                    "Get weather of a location, the user should supply a location first.",
                    "Get the current weather in a given location",
                    "Get the weather for a city",
                ]
            )
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def time_tool(self) -> dict[str, Any]:
        properties = {"city": {"type": "string", "description": "The city name"}}
        parameters = {"type": "object", "properties": properties, "required": ["city"]}
        return function_tool("get_time", "Get the current time in a city", parameters)

    def add_tool(self) -> dict[str, Any]:
        properties = {"a": {"type": "number"}, "b": {"type": "number"}}
        parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
        return function_tool("add", "Add two numbers", parameters)

    def mail_tool(self) -> dict[str, Any]:
        properties = {"to": {"type": "string"}, "subject": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["to", "subject"]}
        return function_tool("send_mail", "Send a mail", parameters)

    def give_tools(self, conversation: Conversation, needed: dict[str, Any], extra: float) -> None:
        tools = [needed]
        for make in (self.weather_tool, self.time_tool, self.add_tool, self.mail_tool):
            tool = make()
            if tool["function"]["name"] != needed["function"]["name"] and self.chance(extra):
                tools.append(tool)
        self.random.shuffle(tools)
        conversation.request["tools"] = tools

    def weather_exchange(self, conversation: Conversation) -> None:
        """Question, call, result and answer."""
        city = self.city()
        forms = [
            "What's the weather like in {c} today?",
            "What is the weather in {c}?",
            "How's the weather in {c}?",
            "What's the weather in {c}?",
            "How is the weather in {c} today?",
            "Tell me the weather in {c}.",
            "What is the weather like in {c}?",
        ]
        form = "Please tell me the weather in {c} today." if self.held_out else self.random.choice(forms)
        conversation.user(form.format(c=city))
        reasoning = f"The user asks about the weather in {city}. I call get_weather."
        conversation.call(reasoning, "get_weather", {"location": city})
        temperature = self.random.randint(-9, 39)
        condition = self.random.choice(
            ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "partly cloudy", "light rain"]
        )
        if self.chance(0.75):
            result: dict[str, Any] = {"temperature": temperature, "condition": condition}
            if self.chance(0.4):
                result = {"location": city, **result}
            if self.chance(0.25):
                result["unit"] = "celsius"
            if self.chance(0.3):
                result = dict(reversed(result.items()))
            conversation.result(json.dumps(result))
        else:
            text = self.random.choice(["{c}, {t}°C", "{t}°C and {c}", "{c}, {t} degrees"])
            conversation.result(text.format(c=condition, t=temperature))
        answer = f"The weather in {city} is {condition} with a temperature of {temperature}°C."
        conversation.assistant(f"The result says {condition} and {temperature} degrees.", answer)

    def cut(self, conversation: Conversation) -> Sample:
        """Finish a tool conversation, now and then already at a call, so that the call is the reply."""
        if self.chance(0.25):
            last_call = max(i for i, message in enumerate(conversation.messages) if message.get("tool_calls"))
            del conversation.messages[last_call + 1 :]
        return conversation.finish()

    def weather(self) -> Sample:
        conversation = self.start("weather", system=0.3)
        self.give_tools(conversation, self.weather_tool(), 0.2)
        if self.chance(0.15):
            self.small_talk(conversation, 1)
        for _ in range(self.random.choice([1, 2, 3])):
            self.weather_exchange(conversation)
        return self.cut(conversation)

    def other_tool(self) -> Sample:
        """The right one of several tools, for the time of a city or for an addition."""
        conversation = self.start("other tool", system=0.3)
        wants_time = self.chance(0.5)
        self.give_tools(conversation, self.time_tool() if wants_time else self.add_tool(), 0.35)
        for _ in range(self.random.choice([1, 2, 3])):
            if wants_time:
                city, hour, minute = self.city(), self.random.randint(0, 23), self.random.randint(10, 59)
                conversation.user(
                    self.random.choice(["What time is it in {c}?", "Tell me the time in {c}."]).format(c=city)
                )
                conversation.call(f"The user asks for the time in {city}. I call get_time.", "get_time", {"city": city})
                conversation.result(json.dumps({"time": f"{hour:02}:{minute}"}))
                conversation.assistant(f"The result says {hour:02}:{minute}.", f"It is {hour:02}:{minute} in {city}.")
            else:
                a, b = self.random.randint(100, 999), self.random.randint(100, 999)
                form = self.random.choice(["Add {a} and {b}.", "Use the tool to add {a} and {b}."])
                conversation.user(form.format(a=a, b=b))
                conversation.call(f"The user wants to add {a} and {b}. I call add.", "add", {"a": a, "b": b})
                conversation.result(str(a + b) if self.chance(0.5) else json.dumps({"result": a + b}))
                conversation.assistant(f"The result is {a + b}.", f"The sum of {a} and {b} is {a + b}.")
        return self.cut(conversation)

    def no_tool(self) -> Sample:
        """Ordinary questions although tools are offered."""
        conversation = self.start("no tool", system=0.3)
        self.give_tools(conversation, self.weather_tool(), 0.3)
        self.small_talk(conversation, self.random.choice([1, 2, 4]))
        return conversation.finish()

    def recall(self) -> Sample:
        """Facts from the system prompt, asked for after filler of 0 to about 900 tokens."""
        conversation = self.start("recall", system=0.0, thinking=0.25)
        word = self.random.choice(CODE_WORDS)
        facts = [
            (
                f"The code word is {word}.",
                ["What is the code word?", "Tell me the code word.", "Which code word did you get?"],
                "The user asks for the code word.",
                f"The code word is {word}.",
            ),
        ]
        name, color, pet = self.random.choice(NAMES), self.random.choice(COLORS), self.random.choice(PETS)
        optional = [
            (
                f"The name of the user is {name}.",
                ["What is my name?", "Do you know my name?", "Tell me my name."],
                "The user asks for the name.",
                f"Your name is {name}.",
            ),
            (
                f"The favorite color of the user is {color}.",
                ["What is my favorite color?", "Which color do I like?"],
                "The user asks for the color.",
                f"Your favorite color is {color}.",
            ),
            (
                f"The user has a {pet}.",
                ["Which pet do I have?", "What pet do I have?"],
                "The user asks for the pet.",
                f"You have a {pet}.",
            ),
        ]
        facts += [fact for fact in optional if self.chance(0.35)]
        self.random.shuffle(facts)
        sentences = self.random.choices(POLICY, k=self.random.choice([0, 2, 5, 10, 20, 30, 40, 50]))
        opening = ["You are a helpful assistant."] if self.chance(0.7) else []
        place = 0 if self.chance(0.7) else self.random.randint(0, len(sentences))
        sentences[place:place] = [fact[0] for fact in facts]
        conversation.system(" ".join(opening + sentences))
        self.small_talk(conversation, self.random.choice([0, 0, 1, 2, 4]))
        questions = self.random.sample(facts, k=self.random.randint(1, len(facts)))
        for _, forms, reasoning, answer in questions:
            conversation.user(self.random.choice(forms))
            conversation.assistant(reasoning, answer)
            if self.chance(0.2):
                self.small_talk(conversation, 1)
        return conversation.finish()


def function_tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool declaration."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
