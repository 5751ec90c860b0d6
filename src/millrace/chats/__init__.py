"""Chats: conversations into tokens, with a mask that is proven."""

from millrace.chats.chat_report import ChatReport
from millrace.chats.conversations import Conversation
from millrace.chats.encoder import ChatEncoder, ChatOptions
from millrace.chats.proof import Document, Turn
from millrace.chats.templates import ChatML, JinjaTemplate

__all__ = [
    "ChatEncoder",
    "ChatML",
    "ChatOptions",
    "ChatReport",
    "Conversation",
    "Document",
    "JinjaTemplate",
    "Turn",
]
