"""What encoding some chats gave, for people: a sum over batches, and a table."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from millrace.checks import text_table


@dataclass(frozen=True, kw_only=True)
class ChatReport:
    """Counts of encoded chats; the reports of batches add up.

    Attributes:
        rows: Number of rows.
        bad_rows: Rows that are problems, those without a target included.
        rows_without_target: Rows of which no token would be trained on.
        documents: Documents made of the rows.
        rewritten: Documents beyond the first of a row, because the template rewrites history.
        turns: Turns that are trained on.
        turns_without_stop: Turns that end without a stop token.
        tokens, trained: Tokens of all documents, and those that are trained on.
        border_tokens: Tokens that hold trained and other characters; they are not trained on.
        routes: Documents by the routes that agree on their masks.

    >>> report = ChatReport(rows=2, documents=2, tokens=20, trained=5) + ChatReport(rows=1)
    >>> print(report.table().splitlines()[0])
    rows                   3
    """

    rows: int = 0
    bad_rows: int = 0
    rows_without_target: int = 0
    documents: int = 0
    rewritten: int = 0
    turns: int = 0
    turns_without_stop: int = 0
    tokens: int = 0
    trained: int = 0
    border_tokens: int = 0
    routes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "ChatReport") -> "ChatReport":
        sums = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.name != "routes"
        }
        return ChatReport(**sums, routes=dict(Counter(self.routes) + Counter(other.routes)))

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are trained on, 0 to 1."""
        return self.trained / self.tokens if self.tokens else 0.0

    def table(self) -> str:
        """The counts as lines of a table."""
        rows = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "routes":
                rows.append([one.name.replace("_", " "), f"{value:,}"])
            if one.name == "trained":
                rows.append(["trained share", f"{self.trained_share:.1%}"])
        rows += [[f"routes {name}", f"{count:,}"] for name, count in sorted(self.routes.items())]
        return "\n".join(text_table(rows))
