"""`millrace tokenize` and `millrace inspect` by the API."""

import json
import tempfile
from pathlib import Path

from millrace import IndexedDataset
from millrace.encoding import Tokenizer
from millrace.encoding.training import train_tokenizer
from millrace.inspect import describe, format_description
from millrace.jobs import tokenize


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = ["The water turns the mill.", "The mill grinds the corn."]
        source = Path(folder, "mill.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

        # Any tokenizer.json of Hugging Face works; this one is trained here.
        train_tokenizer([source], f"{folder}/tokenizer.json", vocabulary_size=300)
        tokenizer = Tokenizer(f"{folder}/tokenizer.json")
        result = tokenize([str(source)], f"{folder}/mill", tokenizer, append_eod=True, workers=1)
        dataset = IndexedDataset(result.prefixes["text"])
        print(format_description(describe(dataset, tokenizer=tokenizer)))


if __name__ == "__main__":
    main()
