"""`dsv4 generate`: the engine without a port. Prompts in, text on the terminal."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from dsv4.cli.engine_options import with_engine_options
from dsv4.config import EngineConfig
from dsv4.engine.protocol import GenerateRequest, RequestOutput
from dsv4.errors import ConfigurationError, RequestError
from dsv4.sampling_parameters import SamplingParameters, parse_sampling_parameters

if TYPE_CHECKING:
    from dsv4.engine.core import EngineCore
    from dsv4.pypto.offline import OfflinePyptoEngine

# ruff: noqa: UP045 - typer reads Optional on Python 3.10

ALIASES = {"max_new_tokens": "max_tokens"}
"""Names of PyPTO Serving's --generate-config that are spelled differently in the API."""


@dataclass
class _Answer:
    """What one prompt has produced."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.text.append(output.text)
        if output.finished:
            self.last = output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(with_engine_options(generate))


def generate(
    prompt: Annotated[list[str], typer.Option(help="A prompt; repeat the option for several, which run together.")],
    generate_config: Annotated[
        Optional[str],
        typer.Option(help='Sampling parameters as a JSON object, for example {"max_new_tokens": 20}.'),
    ] = None,
    show_token_ids: Annotated[bool, typer.Option("--show-token-ids", help="Print the token ids too.")] = False,
    *,
    engine_flags: dict[str, Any],
) -> None:
    """Continue prompts with the engine that also serves, in this process."""
    parameters = read_generate_config(generate_config)
    config = EngineConfig.build(overrides=engine_flags)

    answers = {str(index): _Answer(text) for index, text in enumerate(prompt)}
    with _load_engine(config) as engine:
        for request_id, answer in answers.items():
            engine.add(
                GenerateRequest(request_id=request_id, prompt_text=answer.prompt, sampling_parameters=parameters)
            )
        terminal = _Terminal(list(answers.values()), show_token_ids=show_token_ids)
        started = time.monotonic()
        while engine.has_work:
            for output in engine.step():
                answers[output.request_id].add(output)
            terminal.show()
        _summarise(list(answers.values()), time.monotonic() - started)
    if any(answer.last is not None and answer.last.error for answer in answers.values()):
        raise typer.Exit(1)


def _load_engine(config: EngineConfig) -> AbstractContextManager[EngineCore | OfflinePyptoEngine]:
    """The engine that --backend names. PyTorch takes seconds to import: a mistake in the flags need not wait for it."""

    def report(text: str) -> None:
        typer.echo(text, err=True)

    if config.backend == "npu":
        from dsv4.pypto.offline import OfflinePyptoEngine

        return OfflinePyptoEngine(config, report)
    from dsv4.engine.loading import load_engine

    return nullcontext(load_engine(config, progress=report))


def read_generate_config(text: str | None) -> SamplingParameters:
    """Sampling parameters from --generate-config. Raises ConfigurationError naming the key."""
    if text is None:
        return SamplingParameters()
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--generate-config is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigurationError(f"--generate-config must be a JSON object, got {text}")
    for alias, name in ALIASES.items():
        if alias in fields:
            if name in fields:
                raise ConfigurationError(f"--generate-config: {alias} and {name} mean the same; give one")
            fields[name] = fields.pop(alias)
            if type(fields[name]) is not int:
                raise ConfigurationError(f"--generate-config: {alias} must be an integer, got {fields[name]!r}")
    try:
        return parse_sampling_parameters(fields)
    except RequestError as error:
        raise ConfigurationError(f"--generate-config: {error.message}") from None


class _Terminal:
    """Streams one answer at a time; answers that run beside it are printed when it is their turn."""

    def __init__(self, answers: list[_Answer], *, show_token_ids: bool) -> None:
        self._answers = answers
        self._show_token_ids = show_token_ids
        self._current = 0
        self._printed = 0
        self._announced = False

    def show(self) -> None:
        """Print what is new."""
        while self._current < len(self._answers):
            answer = self._answers[self._current]
            if not self._announced:
                self._write(f"[{self._current + 1}/{len(self._answers)}] {answer.prompt}")
                self._announced = True
            self._write("".join(answer.text[self._printed :]))
            self._printed = len(answer.text)
            if answer.last is None:
                return
            self._finish(answer, answer.last)
            self._current, self._printed, self._announced = self._current + 1, 0, False

    def _finish(self, answer: _Answer, last: RequestOutput) -> None:
        if last.error is not None:
            self._write(f"\n  {last.error}\n")
            return
        reason = last.finish_reason.value if last.finish_reason is not None else "unknown"
        self._write(f"\n  finish reason {reason}, {len(answer.token_ids)} tokens\n")
        if self._show_token_ids:
            self._write(f"  token ids {answer.token_ids}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _summarise(answers: list[_Answer], seconds: float) -> None:
    tokens = sum(len(answer.token_ids) for answer in answers)
    usages = [answer.last.usage for answer in answers if answer.last is not None and answer.last.usage is not None]
    drafts = sum(usage.draft_tokens for usage in usages)
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    text = f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    if drafts:
        text += f", {accepted} of {drafts} drafts accepted"
    typer.echo(text, err=True)
