"""Fine-tune a tiny model on a few chats, in seconds and with nothing but NumPy.

After `millrace demo`, the model is first trained on the demo's text:

    python examples/fine_tune_chats.py millrace-demo
"""

import json
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np

from millrace import GPTDataset, IndexedDataset, Loader
from millrace.chats import ChatEncoder
from millrace.encoding import Tokenizer
from millrace.encoding.training import train_tokenizer
from millrace.inspect import format_chat
from millrace.online import TextDataset

CHATS = Path(__file__).with_name("chats.jsonl")
TEXT_STEPS, CHAT_STEPS = 64, 24
WINDOW, WIDTH = 16, 8  # tokens that the model sees, and the size of their embeddings
RATE = 0.03  # of AdaGrad


def main(folder: Path) -> None:
    path, text = folder / "tokenizer.json", folder / "packages_text_document"
    if not path.exists():
        (folder / "chats.txt").write_text(CHATS.read_text())
        specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        train_tokenizer([folder / "chats.txt"], path, vocabulary_size=500, special_tokens=specials)
    tokenizer = Tokenizer(path)
    model = TinyModel(tokenizer.vocabulary_size)
    if text.with_suffix(".idx").exists():
        print(f"\nA tiny model ({model.num_weights:,} weights), trained on {text}")
        dataset = GPTDataset(IndexedDataset(text), sequence_length=64, seed=1234)
        train(model, Loader(dataset, micro_batch_size=4), TEXT_STEPS)

    rows = [json.loads(line) for line in CHATS.read_text().splitlines()]
    encoder = ChatEncoder(tokenizer)
    print(f"\nFine-tuned on {len(rows)} chats: on what `millrace inspect` shows between ⟦ and ⟧")
    print(textwrap.indent(format_chat(encoder.explain(rows[0])), "   "))
    packs = TextDataset(
        CHATS,
        encoder,
        order="packs",
        seed=1234,
        num_samples=2 * CHAT_STEPS,
        cache=folder / "chats",
        sequence_length=256,
        add_extra_token=False,
        boundaries="documents",
    )
    train(model, Loader(packs, micro_batch_size=2), CHAT_STEPS)

    print("\nWhat it answers, up to the stop token: a model of this size learns by heart, no more")
    stop = tokenizer.special_tokens()["<|im_end|>"]
    for row in rows[1:4]:
        (chat,) = encoder.explain(row)
        prompt = chat["tokens"][: chat["trained"].index(True)]
        answer = tokenizer.decode(model.answer(prompt, stop))
        print(f"   {row['messages'][-2]['content']}\n      {answer}")


def train(model: "TinyModel", loader: Loader, num_steps: int) -> None:
    """Trains, and prints the mean loss of each eighth of the steps as soon as it is known."""
    print("   loss", end="", flush=True)
    for steps in np.array_split(np.arange(num_steps), 8):
        losses = [model.train_step(next(loader)) for _ in steps]
        print(f"   {np.mean(losses):.2f}", end="", flush=True)
    print(f"   in {num_steps} steps")


class TinyModel:
    """Embeddings of the last tokens of a document, and a matrix that scores the next one."""

    def __init__(self, vocabulary_size: int) -> None:
        embedding = np.random.default_rng(1).standard_normal((vocabulary_size + 1, WIDTH))
        output = np.zeros((WINDOW * WIDTH, vocabulary_size), np.float32)
        self.weights = {"embedding": embedding.astype(np.float32), "output": output}
        self.squares = {name: np.full_like(one, 1e-8) for name, one in self.weights.items()}
        self.nothing = vocabulary_size  # the token before a document
        self.num_weights = sum(one.size for one in self.weights.values())

    def train_step(self, batch: dict[str, np.ndarray]) -> float:
        """One step on a batch of a `Loader`; the mean loss of the tokens that are trained on."""
        is_target, lags = batch["loss_mask"] > 0, np.arange(WINDOW)
        places = np.maximum(np.arange(is_target.shape[1])[:, None] - lags, 0)
        is_before = batch["position_ids"][..., None] < lags
        contexts = np.where(is_before, self.nothing, batch["tokens"][:, places])
        loss, gradients = self.gradients(contexts[is_target], batch["labels"][is_target])
        for name, gradient in gradients.items():
            self.squares[name] += gradient**2
            self.weights[name] -= RATE * gradient / np.sqrt(self.squares[name])
        return loss

    def answer(self, prompt: list[int], stop: int, max_tokens: int = 60) -> list[int]:
        """The likeliest next tokens, one by one, up to and with the token `stop`."""
        tokens = [self.nothing] * WINDOW + prompt
        answer: list[int] = []
        while len(answer) < max_tokens and stop not in answer:
            inputs = self.inputs(np.array([tokens[: -WINDOW - 1 : -1]]))
            answer.append(int((inputs @ self.weights["output"]).argmax()))
            tokens.append(answer[-1])
        return answer

    def inputs(self, contexts: np.ndarray) -> np.ndarray:
        """The embeddings of contexts [n, WINDOW], which begin with the last token."""
        return self.weights["embedding"][contexts].reshape(len(contexts), -1)

    def gradients(
        self, contexts: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The mean loss of the labels behind some contexts, and its gradients."""
        inputs, targets = self.inputs(contexts), (np.arange(len(labels)), labels)
        shares = inputs @ self.weights["output"]
        shares = np.exp(shares - shares.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        loss = -np.log(shares[targets]).mean()
        shares[targets] -= 1
        errors = shares / len(labels)
        to_inputs = (errors @ self.weights["output"].T).reshape(*contexts.shape, -1)
        embedding = np.zeros_like(self.weights["embedding"])
        np.add.at(embedding, contexts, to_inputs)
        return float(loss), {"embedding": embedding, "output": inputs.T @ errors}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(*sys.argv[1:] or [temporary]))
