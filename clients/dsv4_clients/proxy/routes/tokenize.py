"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from dsv4.chat.tokenizer import ChatTokenizer
from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv4_clients.proxy.chat_completion import encode_only
from dsv4_clients.proxy.context import ProxyContext, context_of, trace_metadata
from dsv4_clients.proxy.disconnect import run_until_disconnect
from dsv4_clients.proxy.errors import invalid, unsupported
from dsv4_clients.proxy.http_json import GENERATION_ERRORS, json_response
from dsv4_clients.proxy.schemas.chat import ChatCompletionRequest
from dsv4_clients.proxy.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from dsv4_clients.proxy.text_completion import check_text
from dsv4_clients.proxy.validation import validated

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_class=Response, responses={200: {"model": TokenizeResponse}, **GENERATION_ERRORS})
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model will see it."""
    context = context_of(request)
    context.resolve_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give exactly one of prompt and messages")
    if body.prompt is not None:
        check_text(body.prompt, "prompt")
        tokens = await asyncio.to_thread(_tokenizer(context, "prompt").encode_text, body.prompt)
    else:
        encoding = encode_only(context, _chat_request(body), metadata=trace_metadata(request))
        tokens = (await run_until_disconnect(request, encoding)).input_ids
    texts = None
    if body.return_token_strs:
        tokenizer = _tokenizer(context, "return_token_strs")
        texts = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    report = await context.monitor.probe()
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": report.engine.get("max_model_len"),
            "tokens": tokens,
            "token_strs": texts,
        }
    )


@router.post(
    "/detokenize", response_class=Response, responses={200: {"model": DetokenizeResponse}, **GENERATION_ERRORS}
)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Text of token ids, control tokens included."""
    context = context_of(request)
    context.resolve_model(body.model)
    tokenizer = _tokenizer(context, "tokens")
    for index, token in enumerate(body.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            raise invalid(f"tokens[{index}]", f"{token} is not in the vocabulary of {tokenizer.vocab_size}")
    return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _chat_request(body: TokenizeRequest) -> ChatCompletionRequest:
    fields = body.model_dump(exclude_unset=True, exclude={"prompt", "add_special_tokens", "return_token_strs"})
    return validated(ChatCompletionRequest, fields)


def _tokenizer(context: ProxyContext, field: str) -> ChatTokenizer:
    if context.tokenizer is None:
        message = "this proxy was started without --tokenizer, only messages can be tokenized"
        raise unsupported(field, message)
    return context.tokenizer
