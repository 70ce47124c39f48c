"""Two ways to get greedy answers from a checkpoint: the product's engine, and transformers as a second opinion."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from checkpoint import read_checkpoint
from dsv4.config import EngineConfig
from dsv4.engine.loading import load_engine
from dsv4.engine.protocol import GenerateRequest
from dsv4.sampling_parameters import SamplingParameters
from network import Network
from tokenizers import Tokenizer
from transformers import DynamicCache
from transformers_model import build_transformers_model


@dataclass
class Answer:
    """Greedy tokens without EOS, as text, and how many of the first MTP drafts were right."""

    text: str = ""
    drafts: int = 0
    accepted: int = 0


class Answerer(Protocol):
    """Answers prompts, each given as (text, most new tokens)."""

    def answer(self, prompts: list[tuple[str, int]]) -> list[Answer]: ...


class EngineAnswerer:
    """Converts the checkpoint to W8A8 and runs the product's engine with one MTP draft a step."""

    def __init__(self, folder: Path, scratch: Path, threads: int) -> None:
        converted = scratch / "w8a8"
        command = [sys.executable, "-m", "dsv4.cli.main", "convert", "--input-dir", str(folder)]
        subprocess.run([*command, "--output-dir", str(converted)], check=True, stdout=subprocess.DEVNULL)
        overrides = {
            "model": str(converted),
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            "max_model_len": 2048,
            "num_threads": threads,
        }
        self.core = load_engine(EngineConfig.build(overrides=overrides), progress=lambda _: None)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(self, prompts: list[tuple[str, int]]) -> list[Answer]:
        ids: dict[str, list[int]] = {}
        answers = [Answer() for _ in prompts]
        for number, (text, limit) in enumerate(prompts):
            prompt = self.tokenizer.encode(text, add_special_tokens=False).ids
            parameters = SamplingParameters(max_tokens=limit, temperature=0.0)
            request = GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling_parameters=parameters)
            self.core.add(request)
        while self.core.has_work:
            for output in self.core.step():
                if output.error:
                    raise RuntimeError(output.error)
                ids.setdefault(output.request_id, []).extend(output.token_ids)
                if output.usage is not None:
                    answer = answers[int(output.request_id)]
                    answer.drafts, answer.accepted = output.usage.draft_tokens, output.usage.accepted_draft_tokens
        for number, answer in enumerate(answers):
            answer.text = readable(self.tokenizer, ids[str(number)])
        return answers


class TransformersAnswerer:
    """The source checkpoint in FP32: text from transformers' cached generation, drafts from the training network."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = read_checkpoint(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = build_transformers_model(config, tensors)
        self.network = Network(config)
        self.network.load(tensors)
        self.network.full_precision = True
        self.end: int = config["eos_token_id"]

    @torch.no_grad()
    def generate(self, prompt: list[int], limit: int) -> list[int]:
        """Greedy tokens, with EOS if it was reached."""
        cache = DynamicCache(config=self.model.config)
        ids, produced = torch.tensor([prompt]), []
        while len(produced) < limit:
            token = int(self.model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].argmax())
            produced.append(token)
            if token == self.end:
                break
            ids = torch.tensor([[token]])
        return produced

    @torch.no_grad()
    def answer(self, prompts: list[tuple[str, int]]) -> list[Answer]:
        answers = []
        for text, limit in prompts:
            prompt = self.tokenizer.encode(text, add_special_tokens=False).ids
            produced = self.generate(prompt, limit)
            _, draft_hidden = self.network(torch.tensor([prompt + produced]))
            rows = slice(len(prompt) - 1, len(prompt) + len(produced) - 2)
            drafts = self.network.logits(draft_hidden[rows]).argmax(-1)
            right = int((drafts == torch.tensor(produced[1:])).sum())
            answers.append(Answer(readable(self.tokenizer, produced), len(produced) - 1, right))
        return answers


def readable(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of an answer with its marks, without EOS."""
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<｜end▁of▁sentence｜>")
