"""Demanded and strict calls, JSON answers: the constraints compile, and what they allow is what the parser reads."""

from __future__ import annotations

import json
import random

import pytest
import xgrammar
from dsv4.chat import ChatParser, MessageBuilder, encode_request
from dsv4.chat.grammar import anchor_control_tokens
from dsv4.errors import RequestError

from tests.unit.chat.small_vocabulary import small_tokenizer

TOKENIZER = small_tokenizer()
DSML_ID = TOKENIZER.token_id("｜DSML｜")
EOS = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def compiler():
    vocabulary = [TOKENIZER._full.id_to_token(token) for token in range(TOKENIZER.vocab_size)]
    info = xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        vocab_size=TOKENIZER.vocab_size,
        stop_token_ids=[EOS],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1)


def tool(name, strict=False, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    if strict:
        parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


LOOSE = tool("loose", city={"type": "string"}, days={"type": "integer"})
STRICT = tool("strict", True, city={"type": "string"}, unit={"enum": ["C", "F"]})


def encode(**fields):
    request = {"messages": [{"role": "user", "content": "q"}], **fields}
    return encode_request(request, tokenizer=TOKENIZER, revision="official")


def compile_constraint(compiler, encoded):
    tag = encoded.sampling_parameters["structured_outputs"]["structural_tag"]
    ebnf = anchor_control_tokens(str(xgrammar.Grammar.from_structural_tag(tag)), DSML_ID)
    return compiler.compile_grammar(ebnf)


def accepts(compiled, ids):
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(token) for token in [*ids, EOS]) and matcher.is_terminated()


def spelled(text):
    return TOKENIZER.encode_plain(text)


def real(text):
    return TOKENIZER.encode_text(text)


def invoke(name, *parameters):
    body = "".join(
        f'<｜DSML｜parameter name="{key}" string="{truth}">{value}</｜DSML｜parameter>\n'
        for key, value, truth in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n'


CITY = ("city", "a\nb <b>", "true")
CALL = invoke("loose", CITY, ("days", "3", "false"))
CLOSE = "</｜DSML｜tool_calls>"
OPEN = "\n\n<｜DSML｜tool_calls>\n"


def test_required_in_chat_mode(compiler):
    encoded = encode(tools=[LOOSE, STRICT], tool_choice="required")
    compiled = compile_constraint(compiler, encoded)
    assert encoded.output_format["start_state"] == "tool_block"
    assert accepts(compiled, real(CALL + CLOSE))
    assert accepts(compiled, real(CALL + invoke("strict", CITY, ("unit", "C", "true")) + CLOSE))
    assert not accepts(compiled, real("no"))
    assert not accepts(compiled, real(CLOSE))
    assert not accepts(compiled, real(CALL))
    assert not accepts(compiled, real(invoke("other") + CLOSE))
    assert not accepts(compiled, real(invoke("loose", CITY) + CLOSE))
    assert not accepts(compiled, real(invoke("loose", CITY, ("days", "x", "false")) + CLOSE))
    assert not accepts(compiled, real(invoke("loose", CITY, ("days", "3", "false"), ("more", "3", "false")) + CLOSE))


def test_only_the_control_token_satisfies_it(compiler):
    compiled = compile_constraint(compiler, encode(tools=[LOOSE], tool_choice="required"))
    assert accepts(compiled, real(CALL + CLOSE))
    assert not accepts(compiled, spelled(CALL + CLOSE))


def test_named_and_single(compiler):
    choice = {"type": "function", "function": {"name": "loose"}}
    named = compile_constraint(compiler, encode(tools=[LOOSE, STRICT], tool_choice=choice))
    assert accepts(named, real(CALL + CALL + CLOSE))
    assert not accepts(named, real(invoke("strict", CITY, ("unit", "C", "true")) + CLOSE))
    single = compile_constraint(
        compiler, encode(tools=[LOOSE, STRICT], tool_choice="required", parallel_tool_calls=False)
    )
    assert accepts(single, real(CALL + CLOSE))
    assert not accepts(single, real(CALL + CALL + CLOSE))


def test_required_in_thinking_mode(compiler):
    encoded = encode(tools=[LOOSE], tool_choice="required", reasoning_effort="low")
    compiled = compile_constraint(compiler, encoded)
    assert encoded.output_format["start_state"] == "reasoning"
    assert accepts(compiled, real("the reason</think>" + OPEN + CALL + CLOSE))
    assert accepts(compiled, [*spelled("a </think> b"), *real("</think>" + OPEN + CALL + CLOSE)])
    assert not accepts(compiled, real("the reason</think>answer"))
    assert not accepts(compiled, real("the reason"))
    assert not accepts(compiled, [*real("the reason"), *spelled("</think>"), *real(OPEN + CALL + CLOSE)])
    assert not accepts(compiled, real("the reason" + OPEN + CALL + CLOSE))


@pytest.mark.parametrize("mode", [{}, {"reasoning_effort": "low"}])
def test_strict_tools_with_auto(compiler, mode):
    compiled = compile_constraint(compiler, encode(tools=[LOOSE, STRICT], **mode))
    before = "hm</think>" if mode else ""
    good = invoke("strict", CITY, ("unit", "F", "true"))
    assert accepts(compiled, real(before + "just text < b"))
    assert accepts(compiled, real(before + "text" + OPEN + good + CLOSE))
    assert accepts(compiled, real(before + OPEN + invoke("loose", ("anything", "[1]", "false")) + CLOSE))
    assert not accepts(compiled, real(before + OPEN + invoke("strict", CITY, ("unit", "K", "true")) + CLOSE))
    assert not accepts(compiled, real(before + OPEN + invoke("strict", CITY) + CLOSE))
    assert not accepts(compiled, real(before + invoke("strict", CITY)))


def test_tools_without_strict_are_not_constrained():
    assert "structured_outputs" not in encode(tools=[LOOSE]).sampling_parameters
    assert "structured_outputs" not in encode(tools=[STRICT], tool_choice="none").sampling_parameters


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def test_json_answers(compiler):
    assert encode(response_format=FORMAT).sampling_parameters == {"structured_outputs": {"json": SCHEMA}}
    assert encode(response_format={"type": "json_object"}).sampling_parameters == {
        "structured_outputs": {"json_object": True}
    }
    thinking = compile_constraint(compiler, encode(response_format=FORMAT, reasoning_effort="low"))
    assert accepts(thinking, real('so</think>{"a": 1}'))
    assert not accepts(thinking, real("so</think>one"))
    with_tools = compile_constraint(compiler, encode(response_format=FORMAT, tools=[LOOSE]))
    assert accepts(with_tools, real('{"a": 1}'))
    assert accepts(with_tools, real(OPEN + CALL + CLOSE))
    assert not accepts(with_tools, real("text"))


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": SCHEMA}, '{"a": 5}', "{}"),
        ({"json": json.dumps(SCHEMA)}, '{"a": 5}', "{}"),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": "(ab)+"}, "abab", "aba"),
        ({"choice": ["yes", "no"]}, "yes", "maybe"),
        ({"grammar": 'root ::= "x" | "y"'}, "y", "z"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "k"}}}, "k", "l"),
    ],
)
def test_structured_outputs_follow_the_reasoning(compiler, constraint, good, bad):
    compiled = compile_constraint(compiler, encode(structured_outputs=constraint, reasoning_effort="low"))
    assert accepts(compiled, real("so</think>" + good))
    assert not accepts(compiled, real("so</think>" + bad))
    assert not accepts(compiled, real(good))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"rege": "a"}}, "structured_outputs.rege"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}, "response_format": FORMAT}, "structured_outputs"),
        ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "guided_regex"),
        (
            {"structured_outputs": {"structural_tag": {"structures": []}}, "reasoning_effort": "low"},
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_bad_constraints_name_the_field(fields, field):
    with pytest.raises(RequestError) as caught:
        encode(**fields)
    assert caught.value.field == field


ENDINGS = [real("</｜DSML｜parameter>"), real("</think>"), real("\n</｜DSML｜invoke>\n"), real(CLOSE)]


def random_output(compiled, rng, most=400):
    """A random walk through what the grammar allows; now and then it tries to end what is open."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    ids = []
    while len(ids) < most:
        if rng.random() < 0.15:
            for token in rng.choice(ENDINGS):
                if not matcher.accept_token(token):
                    break
                ids.append(token)
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(TOKENIZER.vocab_size) if words[t // 32] >> (t % 32) & 1]
        token = EOS if EOS in allowed else rng.choice(allowed)
        assert matcher.accept_token(token)
        if token == EOS:
            return ids
        ids.append(token)
    return None


@pytest.mark.parametrize("mode", [{}, {"reasoning_effort": "low"}])
def test_whatever_the_grammar_allows_is_a_call(compiler, mode):
    encoded = encode(tools=[LOOSE, STRICT], tool_choice="required", **mode)
    compiled = compile_constraint(compiler, encoded)
    rng = random.Random(7)
    finished = 0
    for _ in range(25):
        ids = random_output(compiled, rng)
        if ids is None:
            continue
        finished += 1
        parser = ChatParser.from_output_format(encoded.output_format, TOKENIZER)
        builder = MessageBuilder()
        builder.add(parser.push(ids).deltas)
        end = parser.finish("stop")
        builder.add(end.deltas)
        assert end.finish_reason == "tool_calls", (end.error, TOKENIZER.decode(ids))
        for call in builder.message()["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments["city"], str)
            if call["function"]["name"] == "strict":
                assert arguments.keys() == {"city", "unit"}
                assert arguments["unit"] in ("C", "F")
            else:
                assert arguments.keys() == {"city", "days"}
                assert isinstance(arguments["days"], int)
    assert finished >= 5
