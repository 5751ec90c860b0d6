"""What encoding some chats gave, for people: a sum over batches, and a table."""

from collections import Counter
from dataclasses import dataclass, field

from millrace.checks import text_table


@dataclass(frozen=True, kw_only=True)
class ChatReport:
    """Counts of encoded chats; the reports of batches add up.

    Attributes:
        counts: By name: "rows"; "bad rows", of which "rows without a target" would train on no
            token; "documents", of which "documents of rewritten history" are beyond the first of
            their row; "turns" that are trained on, of which "turns without a stop token"; "tokens",
            of which "trained tokens"; "tokens across a border" of trained and other characters,
            which are not trained on; and documents by the routes that agree on their masks.

    >>> report = ChatReport(counts=Counter(tokens=20)) + ChatReport(counts=Counter(tokens=1))
    >>> print(report.table())
    tokens            21
    trained share  0.00%
    """

    counts: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "ChatReport") -> "ChatReport":
        total = Counter(self.counts)
        total.update(other.counts)  # keeps zeros, and the order
        return ChatReport(counts=total)

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are trained on, 0 to 1."""
        return self.counts["trained tokens"] / max(self.counts["tokens"], 1)

    def table(self) -> str:
        """The counts as lines of a table."""
        rows = [[name, f"{count:,}"] for name, count in self.counts.items()]
        return "\n".join(text_table([*rows, ["trained share", f"{self.trained_share:.2%}"]]))
