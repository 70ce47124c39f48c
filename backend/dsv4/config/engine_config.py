"""Every flag of the engine in one dataclass: engine.json, environment and command line fill the same fields.

The command line options and the table of flags in the documentation are generated from the fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4.cache.groups import BLOCK_SIZE, MAX_ROWS_PER_SEQUENCE
from dsv4.errors import ConfigurationError

Backend = Literal["cpu", "npu", "torch-npu", "cuda"]

PREFILL_EXTENT_LIMIT = 8192
"""Most positions of one request that one step computes, the ceiling of the main prefill kernel."""

DEFAULT_MAX_MODEL_LEN = 8192
ENVIRONMENT_PREFIX = "DSV4_"
OTHER_VARIABLES = ("DSV4_CACHE_DIR", "DSV4_PYTHON", "DSV4_ENGINE_CONFIG", "DSV4_API_KEYS", "DSV4_HEALTH_URL")
OTHER_VARIABLE_PREFIXES = ("DSV4_FAULT_", "DSV4_PROXY_", "DSV4_PYPTO_", "DSV4_TRITON_")
"""Environment variables that belong to other parts of the project; any further DSV4_ name is a mistake."""

A2A3_MAX_MODEL_LEN = 16384


@dataclass(frozen=True)
class DecodeTile:
    """A decode kernel of the a2a3 platform: requests and rows per request on one rank, requests over eight ranks."""

    name: str
    max_num_seqs: int


def decode_tile(num_speculative_tokens: int) -> DecodeTile:
    """The kernel that the number of drafts selects: B8S1, B8S2, B4S4 or B2S8."""
    if num_speculative_tokens == 0:
        return DecodeTile("B8S1", 64)
    if num_speculative_tokens == 1:
        return DecodeTile("B8S2", 64)
    if num_speculative_tokens <= 3:
        return DecodeTile("B4S4", 32)
    return DecodeTile("B2S8", 16)


def _flag(default: Any, help_text: str, *, unit: str = "", choices: tuple[Any, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, "unit": unit, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is to do. `EngineConfig.build` merges the sources; a constructed object has been checked.

    Raises ConfigurationError for a value out of range; the message names the flag.
    """

    model: str | None = _flag(None, "Directory of the checkpoint. Default: the dsv4-nano that ships with the project.")
    served_model_name: str | None = _flag(None, "Name of the model in the API. Default: the directory's name.")
    backend: Backend | None = _flag(  # noqa: RUF009 - a dataclasses.field
        None,
        "What computes: 'cpu' is the reference engine in PyTorch, 'npu' PyPTO's kernels; 'torch-npu' and 'cuda' are "
        "refused so far. Default: cpu.",
        choices=("cpu", "npu", "torch-npu", "cuda"),
    )
    platform: str | None = _flag(None, "NPU platform of --backend npu.", choices=("a2a3",))
    devices: str | None = _flag(None, "Device ids, comma separated, for example 0,1,2,3,4,5,6,7.")
    dp: int = _flag(1, "Attention data parallel ranks. On the CPU: number of cache partitions.", choices=(1, 2, 4, 8))
    ep: int | None = _flag(None, "Expert parallel ranks: the same ranks as --dp, so equal to it. Default: --dp.")
    tp: int = _flag(1, "Tensor parallel ranks; only 1.", choices=(1,))
    numerics: Literal["w8a8", "float"] = _flag(
        "w8a8", "'w8a8' multiplies in INT8 like the NPU kernels, 'float' in FP32.", choices=("w8a8", "float")
    )
    block_size: int = _flag(BLOCK_SIZE, "Tokens of a cache block; only 128.", unit="tokens", choices=(BLOCK_SIZE,))
    max_model_len: int | None = _flag(
        None,
        f"Most tokens of a request, prompt and output together. Default: what the model allows, at most "
        f"{DEFAULT_MAX_MODEL_LEN}.",
        unit="tokens",
    )
    max_num_seqs: int = _flag(32, "Most requests that run at once; more wait.", unit="requests")
    max_num_batched_tokens: int = _flag(512, "Most rows of one step over all requests.", unit="tokens")
    long_prefill_token_threshold: int = _flag(
        2048, "Most prompt tokens of one request in one step; 0 means no limit of its own.", unit="tokens"
    )
    speculative_config: str | dict[str, Any] | None = _flag(  # noqa: RUF009 - a dataclasses.field
        None, 'Speculation as JSON: {"method":"mtp","num_speculative_tokens":K} with K drafts a step. Default: off.'
    )
    num_speculative_tokens: int | None = _flag(None, "Deprecated alias of --speculative-config.", unit="tokens")
    enable_prefix_caching: bool = _flag(True, "Share the cache of equal prompt beginnings, in pages of 128 tokens.")
    kv_cache_memory: int | None = _flag(
        None, "Memory of the cache pages. Default: room for --max-num-seqs requests of full length.", unit="bytes"
    )
    memory_utilization: float = _flag(
        0.9, "Share of the memory left after loading that the cache pages may take.", unit="fraction"
    )
    max_queued_requests: int = _flag(512, "Most waiting requests; further ones are refused.", unit="requests")
    request_timeout_seconds: float = _flag(1800.0, "Deadline of requests that bring none.", unit="seconds")
    start_timeout_seconds: float = _flag(1800.0, "Longest time to start.", unit="seconds")
    stall_timeout_seconds: float = _flag(
        3.0,
        "An engine that has work but neither finishes a step nor uses the CPU for this long is restarted (cpu only).",
        unit="seconds",
    )
    hang_timeout_seconds: float = _flag(
        120.0, "An engine that has work but finishes no step for this long is restarted.", unit="seconds"
    )
    max_restarts: int = _flag(5, "Quick deaths in a row after which the engine is given up.", unit="restarts")
    drain_seconds: float = _flag(30.0, "How long running requests may take when the engine ends.", unit="seconds")
    seed: int | None = _flag(None, "Seed of sampled requests that bring none. Default: a new one for each request.")
    num_threads: int | None = _flag(None, "CPU threads of the network. Default: PyTorch's choice.", unit="threads")
    profile_output: str | None = _flag(None, "Directory for traces. Without it profiling is off.")
    debug_fill_nan: bool = _flag(False, "Fill cache pages with NaN, so that a read of an unwritten row shows.")
    ring_dep_pool: int | None = _flag(None, "PyPTO runtime: dependency pool entries of the task ring.", unit="entries")
    ring_task_window: int | None = _flag(None, "PyPTO runtime: task window of the ring.", unit="tasks")
    ring_heap: int | None = _flag(None, "PyPTO runtime: heap of the ring.", unit="bytes")
    show_startup_logs: bool = _flag(False, "Log the phases of the start in detail.")

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self.num_drafts  # noqa: B018 - reads and so checks the two speculation flags
        if self.backend == "npu":
            self._check_a2a3()

    @property
    def num_drafts(self) -> int:
        """Drafts a step (K), 0 without speculation."""
        from_json = _drafts_of(self.speculative_config)
        if self.num_speculative_tokens is None:
            return from_json or 0
        if from_json is not None and from_json != self.num_speculative_tokens:
            raise ConfigurationError("--num-speculative-tokens contradicts --speculative-config; give only the latter")
        return self.num_speculative_tokens

    def resolve_max_model_len(self, max_position_embeddings: int) -> int:
        """`max_model_len`, or its default for a model. Raises ConfigurationError when the model has fewer positions."""
        if self.max_model_len is None:
            return min(max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > max_position_embeddings:
            raise ConfigurationError(
                f"--max-model-len {self.max_model_len} exceeds the model's {max_position_embeddings} positions"
            )
        return self.max_model_len

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        if self.served_model_name:
            return self.served_model_name
        return Path(self.model).name if self.model else "dsv4-nano"

    @property
    def prefill_extent(self) -> int:
        """Most positions of one request in one step."""
        limits = [PREFILL_EXTENT_LIMIT, self.max_num_batched_tokens]
        if self.long_prefill_token_threshold > 0:
            limits.append(self.long_prefill_token_threshold)
        if self.max_model_len is not None:
            limits.append(self.max_model_len)
        return min(limits)

    @classmethod
    def build(
        cls,
        *,
        file: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """Merge the sources; later ones win: engine.json, `DSV4_*` variables, the command line.

        `environment` None means that of the process. Values of `overrides` that are None were not given.

        Raises:
            ConfigurationError: an unknown name, a wrong type, or a value out of range.
        """
        values: dict[str, Any] = {}
        if file is not None:
            values.update(_read_file(Path(file)))
        values.update(_read_environment(os.environ if environment is None else environment))
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        _refuse_unknown(given, "the command line")
        values.update(given)
        return cls(**values)

    def to_json(self) -> bytes:
        """All fields as a JSON object that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> EngineConfig:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def _check_types(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            accepted = _plain_types(hints[field.name])
            if float in accepted and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) not in accepted:
                names = " or ".join(kind.__name__ for kind in accepted if kind is not type(None))
                raise ConfigurationError(f"{option_name(field.name)} must be {names}, got {value!r}")
            choices = field.metadata["choices"]
            if choices and value is not None and value not in choices:
                listed = ", ".join(map(str, choices))
                raise ConfigurationError(f"{option_name(field.name)} must be one of {listed}, got {value!r}")

    def _check_ranges(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise ConfigurationError(f"{option_name(name)} {rule}, got {getattr(self, name)!r}")

        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "num_threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "must be at least 1")
        for name in ("ring_dep_pool", "ring_task_window", "ring_heap"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "must be at least 1")
        for name in ("request", "start", "stall", "hang"):
            seconds = getattr(self, f"{name}_timeout_seconds")
            require(math.isfinite(seconds) and seconds > 0, f"{name}_timeout_seconds", "must be positive")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "must be at least 2")
        require(math.isfinite(self.drain_seconds) and self.drain_seconds >= 0, "drain_seconds", "must not be negative")
        require(self.long_prefill_token_threshold >= 0, "long_prefill_token_threshold", "must not be negative")
        require(0 < self.memory_utilization <= 1, "memory_utilization", "must be above 0 and at most 1")
        require(self.max_queued_requests >= 1, "max_queued_requests", "must be at least 1")
        require(self.max_restarts >= 0, "max_restarts", "must not be negative")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"must be at least --max-num-seqs ({self.max_num_seqs}), or running requests would have to wait",
        )
        require(self.ep in (None, self.dp), "ep", f"must equal --dp ({self.dp}): both use the same ranks")
        if self.devices is not None:
            require(all(part.strip().isdecimal() for part in self.devices.split(",")), "devices", "must be numbers")

    def _check_a2a3(self) -> None:
        drafts = self.num_drafts
        tile = decode_tile(drafts)
        devices = self.devices.split(",") if self.devices else []
        checks = (
            (self.platform is not None, "--backend npu needs --platform a2a3"),
            (self.dp == 8, "--platform a2a3 needs --dp 8 --ep 8 --tp 1"),
            (
                len(devices) == 8 and len(set(devices)) == 8,
                "--platform a2a3 needs exactly eight --devices, for example 0,1,2,3,4,5,6,7",
            ),
            (
                self.max_num_seqs <= tile.max_num_seqs,
                f"--max-num-seqs {self.max_num_seqs} is too high: {drafts} speculative tokens select the decode tile "
                f"{tile.name}; set --max-num-seqs no higher than {tile.max_num_seqs}",
            ),
            (
                self.max_model_len is None or self.max_model_len <= A2A3_MAX_MODEL_LEN,
                f"--max-model-len must be at most {A2A3_MAX_MODEL_LEN} on a2a3",
            ),
            (
                self.max_model_len is None or self.max_model_len % BLOCK_SIZE == 0,
                f"--max-model-len must be a multiple of --block-size {BLOCK_SIZE} on a2a3",
            ),
            (self.numerics == "w8a8", "--numerics must be w8a8 on a2a3"),
        )
        for correct, message in checks:
            if not correct:
                raise ConfigurationError(message)


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(EngineConfig)}
"""The flags by name; `metadata` has help, unit and choices."""


def option_name(field_name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field_name.replace("_", "-")


def plain_type(field_name: str) -> type:
    """The type of a flag's value without None: str, int, float or bool (JSON objects are written as str)."""
    hints = typing.get_type_hints(EngineConfig)
    return next(kind for kind in _plain_types(hints[field_name]) if kind in (str, int, float, bool))


def flags_table() -> str:
    """The flags as a Markdown table for the documentation."""
    rows = ["| flag | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |"]
    for field in FIELDS.values():
        default = "" if field.default is None else f"`{field.default}`"
        help_text = field.metadata["help"].replace("|", "\\|")
        kind = plain_type(field.name).__name__
        rows.append(f"| `{option_name(field.name)}` | {kind} | {default} | {field.metadata['unit']} | {help_text} |")
    return "\n".join(rows)


def _plain_types(hint: Any) -> tuple[type, ...]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _plain_types(part))
    if origin is Literal:
        return tuple({type(choice) for choice in typing.get_args(hint)})
    return (origin or hint,)


def _drafts_of(value: str | dict[str, Any] | None) -> int | None:
    """num_speculative_tokens of a speculative config, None when there is none."""
    if value is None or value == "":
        return None
    flag = "--speculative-config"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigurationError(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{flag} must be a JSON object, got {value!r}")
    unknown = sorted(set(value) - {"method", "num_speculative_tokens"})
    if unknown:
        raise ConfigurationError(f"{flag} has the unknown key {unknown[0]!r}; known are method, num_speculative_tokens")
    if value.get("method", "mtp") != "mtp":
        raise ConfigurationError(f"{flag}: method must be 'mtp', got {value['method']!r}")
    return _checked_drafts(value.get("num_speculative_tokens"), f"{flag}: num_speculative_tokens")


def _checked_drafts(drafts: Any, label: str) -> int:
    # A draft and its verification are rows of one call, and a call has a bounded number of rows of one sequence.
    highest = MAX_ROWS_PER_SEQUENCE - 1
    if type(drafts) is not int or not 0 <= drafts <= highest:
        raise ConfigurationError(f"{label} must be an integer from 0 to {highest}, got {drafts!r}")
    return drafts


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    # Both spellings of a flag are in use for JSON files.
    values = {name.replace("-", "_"): value for name, value in document.items() if value is not None}
    _refuse_unknown(values, str(path))
    return values


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable.startswith(OTHER_VARIABLE_PREFIXES):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        _refuse_unknown({name: text}, "the environment", spelled=variable)
        values[name] = parse_text(name, text, label=variable)
    return values


def parse_text(field_name: str, text: str, *, label: str) -> Any:
    """A flag's value from text. Raises ConfigurationError naming `label`."""
    kind = plain_type(field_name)
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ConfigurationError(f"{label} must be true or false, got {text!r}")
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        raise ConfigurationError(f"{label} must be a number of type {kind.__name__}, got {text!r}") from None


def _refuse_unknown(values: Mapping[str, Any], source: str, *, spelled: str | None = None) -> None:
    for name in values:
        if name not in FIELDS:
            nearest = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigurationError(f"{source}: unknown engine flag {spelled or name!r}{hint}")
