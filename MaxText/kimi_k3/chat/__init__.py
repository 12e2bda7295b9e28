"""K3's chat format: conversations to ids, and the model's ids to thinking, text and tool calls.

See docs/chat.md for the format and its sources.
"""

from kimi_k3.chat.control import stop_ids
from kimi_k3.chat.encoder import encode_conversation, render
from kimi_k3.chat.parsed import ParsedMessage, ToolCall
from kimi_k3.chat.parser import StreamingParser, parse

__all__ = ["ParsedMessage", "StreamingParser", "ToolCall", "encode_conversation", "parse", "render", "stop_ids"]
