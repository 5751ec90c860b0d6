"""`millrace tokenize` and `millrace inspect` by the API."""

import json
import tempfile
from pathlib import Path

import tokenizers

from millrace import IndexedDataset
from millrace.inspect import describe, format_description
from millrace.jobs import tokenize
from millrace.text import Tokenizer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = ["The water turns the mill.", "The mill grinds the corn."]
        source = Path(folder, "mill.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

        # Any Hugging Face tokenizer.json works; this one has a token for each byte.
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        model.save(f"{folder}/tokenizer.json")

        tokenizer = Tokenizer(f"{folder}/tokenizer.json")
        result = tokenize([str(source)], f"{folder}/mill", tokenizer, append_eod=True, workers=1)
        dataset = IndexedDataset(result.prefixes["text"])
        print(format_description(describe(dataset, tokenizer=tokenizer)))


if __name__ == "__main__":
    main()
