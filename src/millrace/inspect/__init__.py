"""What is in the files: descriptions for people and for programs."""

from millrace.inspect.describe import Description, describe, format_description

__all__ = ["Description", "describe", "format_description"]
