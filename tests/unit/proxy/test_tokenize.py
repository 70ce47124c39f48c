from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from dsv4.chat.protocol import STRUCTURAL_TOKENS
from dsv4_clients.proxy.settings import ProxySettings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.proxy.conftest import StartProxy, running_proxy
from tests.unit.proxy.triton_double import TritonDouble


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with no merges: one token a byte, and the control tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(STRUCTURAL_TOKENS))
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return directory


async def test_text_round_trip(start_proxy: StartProxy, tokenizer_directory: Path) -> None:
    client = await start_proxy(tokenizer=tokenizer_directory)
    text = "héllo<think>"
    answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == 7
    assert answer["max_model_len"] == 512
    assert answer["token_strs"][-1] == "<think>"
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}
    wrong = await client.post("/detokenize", json={"tokens": [1, 10**6]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens[1]")


async def test_token_ids_can_be_echoed(start_proxy: StartProxy, tokenizer_directory: Path) -> None:
    client = await start_proxy(tokenizer=tokenizer_directory)
    ids = (await client.post("/tokenize", json={"prompt": "ab"})).json()["tokens"]
    answer = (await client.post("/v1/completions", json={"prompt": ids, "echo": True})).json()
    assert answer["choices"][0]["text"] == "abHello world"


async def test_conversations_need_no_tokenizer(client: httpx.AsyncClient, triton: TritonDouble) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    assert answer == {"count": 5, "max_model_len": 512, "tokens": [0, 1, 2, 3, 4], "token_strs": None}
    assert json.loads(json.dumps(triton.encoded[0])) == {"messages": messages}
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
    both = await client.post("/tokenize", json={"prompt": "x", "messages": messages})
    assert both.status_code == 400


async def test_missing_tokenizer_is_a_start_error(tmp_path: Path) -> None:
    from dsv4.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="tokenizer"):
        async with running_proxy(ProxySettings(tokenizer=tmp_path)):
            pass
