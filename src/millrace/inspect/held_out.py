"""Documents of a run by the lines of files that they came from, and whether they were drawn."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from millrace.checks import MAX_INT64
from millrace.errors import ConfigError
from millrace.inspect.description import NO_ORIGINS, format_origin
from millrace.inspect.trace import Trace, Visit

_LINE = re.compile("(.+):([0-9]{1,18})", re.DOTALL)  # FILE:N


def find_documents(
    trace: Trace, lines: Iterable[str], source: str | None = None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The documents that came from some lines.

    Files are the same if one path ends with the other: origins have paths as they were given to
    `millrace tokenize`.

    Args:
        trace: The trace of the run.
        lines: FILE:N for each line, or row.
        source: Name of the source to look in; None: all of them.

    Yields:
        The name of the source, the number of the document and its `Origin` by name.

    Raises:
        ConfigError: A source without origins, or a line that is not FILE:N.
    """
    files = defaultdict[int, list[str]](list)
    for line in lines:
        if (parts := _LINE.fullmatch(line)) is None:
            raise ConfigError(f"a line is {line}: give FILE:N, such as web.jsonl:17")
        files[int(parts[2])].append(parts[1])
    numbers = np.array([*files], np.int64)
    places = range(len(trace.names)) if source is None else trace.sources(source)
    for name, place in {trace.names[one]: one for one in places}.items():  # parts of a file: once
        file = getattr(trace.store(place), "origins_file", None)
        if file is None:
            raise ConfigError(f"{name}: {NO_ORIGINS}. To look elsewhere, name a source")
        for first, table in file.groups_with(min(files, default=0), max(files, default=0)):
            rows = np.flatnonzero(np.isin(table.column("line"), numbers))
            for row, origin in zip(rows.tolist(), table.take(rows).to_pylist(), strict=True):
                if any(_is_same(origin["source"], path) for path in files[origin["line"]]):
                    yield name, first + row, origin


def _is_same(*paths: str) -> bool:
    # Origins have escapes in place of what is not UTF-8.
    texts = [path.encode(errors="backslashreplace").decode() for path in paths]
    ends = [[part for part in text.split("/") if part not in ("", ".", "..")] for text in texts]
    size = min(map(len, ends))
    return ends[0][-size:] == ends[1][-size:]


def check_held_out(trace: Trace, path: str, until: int | None = None) -> dict[str, Any]:
    """Looks for the lines that a list holds out in all that a run draws before a sample.

    Documents are known by where they came from: equal text elsewhere is not found.

    Args:
        trace: The trace of the run.
        path: The list: JSONL, whose own lines are held out, or text with FILE:N on each line.
        until: The sample number; None: the end of the run.

    Returns:
        `num_documents`, the number of documents in the run's token files that come from the list;
        `num_lines` of the list, and `num_unknown_lines`, from which no document comes; and `seen`,
        of each document that is drawn, and not skipped, the `origin` and the first `visit`.

    Raises:
        ConfigError: A source without origins, a list that is empty, or cannot be read, or no end:
            nothing can be proved.
    """
    if until is None and trace.num_samples == MAX_INT64:
        raise ConfigError("the run has no end: give the step, or sample, before which to look")
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:  # lines as `tokenize` counts
            entries = [*enumerate(map(str.strip, file), 1)]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    lines = [f"{path}:{n}" if text.startswith("{") else text for n, text in entries if text]
    if not lines:
        raise ConfigError(f"{path} is empty, so that it holds nothing out: give another list")
    documents: dict[str, dict[Any, Any]] = defaultdict(dict)
    files: dict[int, set[str]] = defaultdict(set)
    for source, document, origin in find_documents(trace, lines):
        documents[source][document] = origin
        files[origin["line"]].add(origin["source"])
    places = [line.rpartition(":") for line in lines]
    unknown = [p for p, _, n in places if not any(_is_same(p, one) for one in files[int(n)])]
    seen: dict[Any, Visit] = {}
    for source, origins in documents.items():
        for visit in trace.visits(source, [*origins], until):
            first = seen.get((source, visit.document), visit)
            if visit.position is not None and visit.sample <= first.sample:  # parts of a file
                seen[source, visit.document] = visit
    visits = [
        {"origin": documents[source][document], "visit": visit}
        for (source, document), visit in seen.items()
    ]
    num_documents = sum(map(len, documents.values()))
    counts = {"num_lines": len(lines), "num_unknown_lines": len(unknown)}
    return {"num_documents": num_documents, **counts, "seen": visits}


def format_held_out(report: Mapping[str, Any]) -> str:
    """What `check_held_out` returns as text for people."""
    lines = [f"{format_origin(one['origin'])}: {one['visit']}" for one in report["seen"]]
    documents = f"{report['num_documents']:,} documents of the run's files come from the list"
    lines.append(
        f"{documents}; {len(lines):,} of them are drawn. Equal text elsewhere is not found"
    )
    if num_unknown := report["num_unknown_lines"]:
        unknown = f"{num_unknown:,} of {report['num_lines']:,} lines are in no source"
        lines.append(f"{unknown}: `millrace tokenize` left them out, or had them at another path")
    return "\n".join(lines)
