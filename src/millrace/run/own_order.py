"""An order of one's own in a configuration: a class, a function, or the name of one."""

from __future__ import annotations

import importlib
from typing import Any

from millrace.checks import shown
from millrace.errors import ConfigError
from millrace.order.plans import PlanOf

_METHODS = ("of", "arrays", "build", "load")


def own_order(order: Any, *, is_cached: bool) -> PlanOf | None:
    """The class or function that makes plans; None for Megatron-LM's.

    Args:
        order: Class, function, "package.module:name", or None.
        is_cached: Whether a cache folder keeps the order's arrays under its name.

    Raises:
        ConfigError: Neither, or a class without the methods of `OrderPlan`.
    """
    if isinstance(order, str):
        order = _imported(order)
    if order is None:
        return None
    if not callable(order) or "<" in getattr(order, "__qualname__", "<"):
        raise ConfigError(
            f"order must be a class or function at the top of a module, or its name "
            f'"package.module:name", not {shown(order)}'
        )
    missing = [name for name in _METHODS if isinstance(order, type) and not hasattr(order, name)]
    if missing:
        raise ConfigError(f"order {name_of_order(order)} has no method {', '.join(missing)}")
    if is_cached and order.__module__ == "__main__":
        raise ConfigError(
            f"order {name_of_order(order)} is of a script, and a cache folder must tell it from "
            "those of other scripts: put it into a module, or leave the cache out"
        )
    return order  # type: ignore[no-any-return]


def name_of_order(order: Any) -> str:
    """The name "package.module:name", by which a file and a cache folder know an order."""
    return f"{order.__module__}:{order.__qualname__}"


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f'order {shown(name)} cannot be imported: {error}. Give "package.module:name" of a '
            "module on Python's path (PYTHONPATH)"
        ) from None
