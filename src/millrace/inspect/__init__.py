"""Descriptions of files, for people and for programs."""

from millrace.inspect.description import Description, describe, format_description

__all__ = ["Description", "describe", "format_description"]
