"""Chats: conversations into tokens, with a mask that is proven."""

from millrace.chats.conversations import Conversation
from millrace.chats.encoder import ChatEncoder
from millrace.chats.options import ChatOptions
from millrace.chats.proof import Document, Turn
from millrace.chats.templates import ChatML, JinjaTemplate

__all__ = [
    "ChatEncoder",
    "ChatML",
    "ChatOptions",
    "Conversation",
    "Document",
    "JinjaTemplate",
    "Turn",
]
