"""DeepSeek V4 chat: encoding requests into prompts, parsing output into OpenAI deltas. Pure Python, no torch."""

from dsv4.chat.detokenizer import IncrementalDetokenizer, OutputStream
from dsv4.chat.encoding import EncodedChat, encode_chat
from dsv4.chat.output_format import OutputFormat
from dsv4.chat.parser import ChatEnd, ChatParser, ChatStep, MessageBuilder
from dsv4.chat.protocol import Revision
from dsv4.chat.request import EncodedRequest, encode_request
from dsv4.chat.revision import detect_revision
from dsv4.chat.stop_strings import StopMatcher
from dsv4.chat.tokenizer import ChatTokenizer

__all__ = [
    "ChatEnd",
    "ChatParser",
    "ChatStep",
    "ChatTokenizer",
    "EncodedChat",
    "EncodedRequest",
    "IncrementalDetokenizer",
    "MessageBuilder",
    "OutputFormat",
    "OutputStream",
    "Revision",
    "StopMatcher",
    "detect_revision",
    "encode_chat",
    "encode_request",
]
