"""Descriptions of files, for people and for programs."""

from millrace.inspect.chats import format_chat, format_report
from millrace.inspect.description import (
    Description,
    ShardsDescription,
    describe,
    describe_shards,
    format_description,
    format_origin,
    format_shards,
)
from millrace.inspect.held_out import check_held_out, find_documents, format_held_out
from millrace.inspect.packs import PackDescription, describe_packs, format_packs, packs_svg
from millrace.inspect.run_forecast import (
    Forecast,
    forecast,
    forecast_change,
    forecast_svg,
    format_forecast,
)
from millrace.inspect.shares import shares_svg
from millrace.inspect.trace import Trace, TracedPart, Visit, format_sample

__all__ = [
    "Description",
    "Forecast",
    "PackDescription",
    "ShardsDescription",
    "Trace",
    "TracedPart",
    "Visit",
    "check_held_out",
    "describe",
    "describe_packs",
    "describe_shards",
    "find_documents",
    "forecast",
    "forecast_change",
    "forecast_svg",
    "format_chat",
    "format_description",
    "format_forecast",
    "format_held_out",
    "format_origin",
    "format_packs",
    "format_report",
    "format_sample",
    "format_shards",
    "packs_svg",
    "shares_svg",
]
