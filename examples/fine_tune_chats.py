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
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last two are ChatML's
TEXT_STEPS, CHAT_STEPS = 64, 24
WINDOW, WIDTH, NUM_NEURONS = 16, 24, 96  # tokens that the model sees, and their embeddings' size
RATE = 0.03  # of AdaGrad


def main(folder: Path) -> None:
    tokenizer = find_tokenizer(folder)
    model = TinyModel(tokenizer.vocabulary_size)
    text = folder / "packages_text_document"
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


def find_tokenizer(folder: Path) -> Tokenizer:
    """The demo's, or one that is trained on the chats."""
    path, text = folder / "tokenizer.json", folder / "chats.txt"
    if not path.exists():
        text.write_text(CHATS.read_text())
        train_tokenizer([text], path, vocabulary_size=500, special_tokens=SPECIAL_TOKENS)
    return Tokenizer(path)


def train(model: "TinyModel", loader: Loader, num_steps: int) -> None:
    """Trains, and prints the mean loss of each eighth of the steps as soon as it is known."""
    print("   loss", end="", flush=True)
    for steps in np.array_split(np.arange(num_steps), 8):
        losses = [model.train_step(next(loader)) for _ in steps]
        print(f"   {np.mean(losses):.2f}", end="", flush=True)
    print(f"   in {num_steps} steps")


class TinyModel:
    """One layer of neurons that sees the last tokens of a document."""

    def __init__(self, vocabulary_size: int) -> None:
        random, num_inputs = np.random.default_rng(1), WINDOW * WIDTH
        weights = {
            "embedding": random.standard_normal((vocabulary_size + 1, WIDTH)),
            "neurons": random.standard_normal((num_inputs, NUM_NEURONS)) / num_inputs**0.5,
            "output": np.zeros((NUM_NEURONS, vocabulary_size)),
        }
        self.weights = {name: one.astype(np.float32) for name, one in weights.items()}
        self.squares = {name: np.full_like(one, 1e-8) for name, one in self.weights.items()}
        self.nothing = vocabulary_size  # the token before a document
        self.num_weights = sum(one.size for one in weights.values())

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
            context = np.array([tokens[: -WINDOW - 1 : -1]])
            answer.append(int(self.scores(context)[-1].argmax()))
            tokens.append(answer[-1])
        return answer

    def scores(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the neurons get, what they give, and a score for each token."""
        inputs = self.weights["embedding"][contexts].reshape(len(contexts), -1)
        neurons = np.tanh(inputs @ self.weights["neurons"])
        return inputs, neurons, neurons @ self.weights["output"]

    def gradients(
        self, contexts: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The mean loss and its gradients; contexts [n, WINDOW] begin with the last token."""
        inputs, neurons, errors = self.scores(contexts)
        errors -= errors.max(axis=1, keepdims=True)
        np.exp(errors, out=errors)  # in place: by far the largest array
        errors /= errors.sum(axis=1, keepdims=True)
        targets = np.arange(len(labels)), labels
        loss = -np.log(errors[targets]).mean()
        errors[targets] -= 1
        errors /= len(labels)
        to_neurons = (errors @ self.weights["output"].T) * (1 - neurons**2)
        to_inputs = (to_neurons @ self.weights["neurons"].T).reshape(*contexts.shape, -1)
        embedding = np.zeros_like(self.weights["embedding"])
        np.add.at(embedding, contexts, to_inputs)
        gradients = {"neurons": inputs.T @ to_neurons, "output": neurons.T @ errors}
        return float(loss), {"embedding": embedding, **gradients}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(*sys.argv[1:] or [temporary]))
