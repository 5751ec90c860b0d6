"""Descriptions of files, for people and for programs."""

from millrace.inspect.chats import format_chat, format_report
from millrace.inspect.description import (
    Description,
    ShardsDescription,
    describe,
    describe_shards,
    format_description,
    format_shards,
)
from millrace.inspect.packs import PackDescription, describe_packs, format_packs, packs_svg
from millrace.inspect.run_forecast import (
    Forecast,
    forecast,
    forecast_change,
    forecast_svg,
    format_forecast,
)
from millrace.inspect.shares import shares_svg

__all__ = [
    "Description",
    "Forecast",
    "PackDescription",
    "ShardsDescription",
    "describe",
    "describe_packs",
    "describe_shards",
    "forecast",
    "forecast_change",
    "forecast_svg",
    "format_chat",
    "format_description",
    "format_forecast",
    "format_packs",
    "format_report",
    "format_shards",
    "packs_svg",
    "shares_svg",
]
