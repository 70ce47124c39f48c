"""The training program of the nano checkpoint: deterministic text, exact formats, the mathematics of transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

TRAINING = Path(__file__).parents[2] / "examples" / "dsv4-nano" / "training"
MODULES = [path.stem for path in TRAINING.glob("*.py")]


@pytest.fixture(scope="module", autouse=True)
def training_folder_on_path() -> Iterator[None]:
    """The training files are a program, not a package: they import each other by bare name."""
    saved = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(TRAINING))
    yield
    sys.path.remove(str(TRAINING))
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(saved)


def training(name: str) -> ModuleType:
    return __import__(name)


def small_config() -> dict:
    config = dict(training("configuration").CONFIG)
    config.update(vocab_size=96, hidden_size=160, moe_intermediate_size=32, n_routed_experts=8, q_lora_rank=64)
    return config


def random_network(config: dict):
    network = training("network").Network(config, 3)
    network.full_precision = True
    generator = torch.Generator().manual_seed(1)
    for name, value in network.tensors().items():
        if name.endswith((".ape", "attn_sink", "gate.bias")):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return network


def test_same_seed_same_text() -> None:
    corpus = training("corpus")
    first, second = (list(islice(corpus.Corpus(7), 60)) for _ in range(2))
    assert first == second
    assert first != list(islice(corpus.Corpus(8), 60))


def test_held_out_text_is_not_trained_on() -> None:
    corpus = training("corpus")
    trained = [sample.text for sample in islice(corpus.Corpus(7), 1500)]
    assert not [city for city in training("vocabulary").HELD_OUT_CITIES if any(city in text for text in trained)]
    held_out = training("questions").QUESTIONS[0][0][-1]
    assert not any(held_out in text for text in trained)
    assert any(held_out in s.text for s in islice(corpus.Corpus(7, "held-out"), 1500))


def test_replies_are_what_the_product_parses() -> None:
    """Every sample's prompt is the product encoder's own, and its text is prompt, reply, end of sentence."""
    corpus = training("corpus")
    encode_chat = pytest.importorskip("dsv4.chat").encode_chat
    for sample in islice(corpus.Corpus(5), 80):
        if sample.request is not None:
            prompt = encode_chat(sample.request, revision="preview").prompt
            assert sample.text == prompt + sample.reply + corpus.EOS


def test_the_vocabulary_can_be_made_again(tmp_path: Path) -> None:
    tokenizer, train = training("tokenizer"), training("train")
    tokenizer.save_tokenizer(
        tokenizer.train_tokenizer(train.SEED, training("configuration").CONFIG["vocab_size"]), tmp_path
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TRAINING.parent / name).read_bytes()


def test_only_assistant_turns_have_full_weight() -> None:
    train, corpus = training("train"), training("corpus")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINING.parent / "tokenizer.json"))
    conversation = corpus.Conversation("test", False)
    conversation.user("What is 1+1?")
    conversation.assistant("", "1+1 = 2.")
    ids, weights = train.tokenize(conversation.finish(), tokenizer)
    trained = [token for token, weight in zip(ids, weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(trained, skip_special_tokens=False) == "1+1 = 2.<｜end▁of▁sentence｜>"


def test_the_start_can_copy() -> None:
    """The second half of a repeated random sequence is predicted without any training."""
    network = training("network").Network(training("configuration").CONFIG, 1)
    network.full_precision = True
    ids = torch.randint(3, 2048, (1, 40), generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    with torch.no_grad():
        hidden, _ = network(ids)
        predicted = network.logits(hidden[40:-1]).argmax(-1)
    assert (predicted == ids[0, 41:]).float().mean() > 0.8


def test_logits_equal_those_of_transformers() -> None:
    config = small_config()
    network = random_network(config)
    model = training("transformers_model").build_transformers_model(config, network.tensors())
    ids = torch.randint(0, 96, (2, 270), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden, _ = network(ids)
        ours = network.logits(hidden).view(2, 270, -1)
        theirs = model(input_ids=ids, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Sinkhorn", "Collapse", "Mix", "NormedProduct"])
def test_fused_kernels_have_the_right_gradients(name: str) -> None:
    """Compared with the same formula in plain tensor operations."""
    kernels = training("fast_kernels")
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).add(0.1).requires_grad_()

    if name == "Sinkhorn":
        inputs = [draw(4, 4, 5)]

        def plain(matrix: torch.Tensor) -> torch.Tensor:
            matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
            for _ in range(3):
                matrix = matrix / (matrix.sum(1, keepdim=True) + 1e-6)
                matrix = matrix / (matrix.sum(0, keepdim=True) + 1e-6)
            return matrix

        fused = kernels.Sinkhorn.apply(*inputs, 4, 1e-6)
    elif name == "Collapse":
        inputs = [draw(5, 4, 8), draw(4, 5)]

        def plain(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return torch.einsum("tcd,ct->td", streams, weights)

        fused = kernels.Collapse.apply(*inputs)
    elif name == "Mix":
        inputs = [draw(5, 4, 8), draw(5, 8), draw(4, 5), draw(4, 4, 5)]

        def plain(streams: torch.Tensor, update: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ot,td->tod", post, update) + torch.einsum("iot,tid->tod", comb, streams)

        fused = kernels.Mix.apply(*inputs)
    else:
        inputs = [draw(5, 8), draw(3, 8)]

        def plain(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return weight @ (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)).t()

        fused = kernels.NormedProduct.apply(*inputs, 1e-6, False)
    expected = plain(*inputs)
    torch.testing.assert_close(fused, expected)
    weights = torch.randn(expected.shape, generator=generator)
    ours = torch.autograd.grad((fused * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mxfp4_is_exact_on_its_own_grid() -> None:
    quantization = training("fake_quantization")
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5] * 2)
    weight = torch.stack((grid, grid * 2.0**-9))
    packed, scales = quantization.encode_mxfp4(weight)
    assert (packed.shape, packed.dtype) == ((2, 16), torch.int8)
    assert (scales.shape, scales.dtype) == ((2, 1), torch.float8_e8m0fnu)
    assert packed.view(torch.uint8)[0, 0] == 0x10  # columns 0 and 1 are codes 0 and 1: low nibble first
    assert torch.equal(quantization.decode_mxfp4(packed, scales), weight)


def test_rounding_in_training_is_rounding_at_export() -> None:
    quantization = training("fake_quantization")
    weight = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(5))
    decoded = torch.stack([quantization.decode_mxfp4(*quantization.encode_mxfp4(matrix)) for matrix in weight])
    assert torch.equal(quantization.quantize_mxfp4(weight), decoded)
    assert (decoded - weight).norm() < 0.15 * weight.norm()
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(6))
    values, scales = quantization.encode_fp8(matrix)
    assert scales.shape == (2, 3)
    assert torch.equal(quantization.quantize_fp8_blocks(matrix), quantization.decode_fp8(values, scales))
    assert (quantization.decode_fp8(values, scales) - matrix).norm() < 0.04 * matrix.norm()


def test_checkpoint_survives_a_round_trip(tmp_path: Path) -> None:
    config = small_config()
    network, checkpoint = random_network(config), training("checkpoint")
    checkpoint.write_checkpoint(network.tensors(), config, tmp_path)
    once = checkpoint.read_checkpoint(tmp_path)
    checkpoint.write_checkpoint(once, config, tmp_path)
    twice = checkpoint.read_checkpoint(tmp_path)
    assert set(once) == set(network.tensors())
    assert all(torch.equal(once[name], twice[name]) for name in once)
