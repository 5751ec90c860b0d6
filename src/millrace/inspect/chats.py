"""A row of conversations as a model sees it: its tokens, and which of them are trained on."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.checks import printable_lines, text_table

_COLOURS, _BRACKETS = ("\x1b[1;32m", "\x1b[0m"), ("⟦", "⟧")


def format_chat(documents: Sequence[dict[str, Any]], *, has_colour: bool = False) -> str:
    """The documents of a row, with the tokens that are trained on in green, or in brackets.

    Args:
        documents: What `ChatEncoder.explain` returns.
        has_colour: Whether to mark tokens by colours of a terminal.
    """
    start, end = _COLOURS if has_colour else _BRACKETS
    lines = []
    for number, one in enumerate(documents):
        num_trained, total = sum(one["trained"]), len(one["trained"])
        lines.append(
            f"document {number}: {num_trained:,} of {total:,} tokens are trained on "
            f"({num_trained / total:.1%}); routes that agree: {', '.join(one['routes'])}"
        )
        lines.append("")
        tokens = zip(one["trained"], one["texts"], strict=True)
        for is_trained, run in itertools.groupby(tokens, lambda token: token[0]):
            text = printable_lines("".join(text for _, text in run))
            lines[-1] += f"{start}{text}{end}" if is_trained else text
    return "\n".join(lines)


def format_report(report: Mapping[str, int]) -> str:
    """The counts of `EncodedRows.report` as a table, with the share of tokens that are trained on.

    >>> print(format_report({"tokens": 2000, "trained tokens": 500}))
    tokens          2,000
    trained tokens    500
    trained share   25.0%
    """
    rows = [[name, f"{count:,}"] for name, count in report.items()]
    if total := report.get("tokens"):
        rows.append(["trained share", f"{report.get('trained tokens', 0) / total:.1%}"])
    return "\n".join(text_table(rows))
