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
        tokens = zip(one["trained"], one["texts"], strict=True)
        runs = []
        for is_trained, run in itertools.groupby(tokens, lambda token: token[0]):
            text = printable_lines("".join(text for _, text in run))
            runs.append(f"{start}{text}{end}" if is_trained else text)
        lines.append("".join(runs))
    return "\n".join(lines)


def format_report(report: Mapping[str, int]) -> str:
    """The counts of encoded rows as lines of a table, with the share of tokens that are trained on.

    Args:
        report: An `EncodedRows.report`, or the sum of several.

    >>> print(format_report({"tokens": 2000, "trained tokens": 500}))
    tokens          2,000
    trained tokens    500
    trained share   25.0%
    """
    rows = [[name, f"{count:,}"] for name, count in report.items()]
    if report.get("tokens"):
        share = report.get("trained tokens", 0) / report["tokens"]
        rows.append(["trained share", f"{share:.1%}"])
    return "\n".join(text_table(rows))
