"""Descriptions of files, for people and for programs."""

from millrace.inspect.description import (
    Description,
    ShardsDescription,
    describe,
    describe_shards,
    format_description,
    format_shards,
)
from millrace.inspect.shares import shares_svg

__all__ = [
    "Description",
    "ShardsDescription",
    "describe",
    "describe_shards",
    "format_description",
    "format_shards",
    "shares_svg",
]
