"""DeepSeek V4 chat: encoding requests into prompts, parsing output into OpenAI deltas. Pure Python, no torch."""

from dsv4.chat.encoding import EncodedChat, encode_chat
from dsv4.chat.protocol import Revision
from dsv4.chat.revision import detect_revision

__all__ = ["EncodedChat", "Revision", "detect_revision", "encode_chat"]
