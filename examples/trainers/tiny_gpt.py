"""A tiny GPT in torch, and sums that do not depend on the number of ranks.

Adding floats in another order changes the last bits. A run that resumes on another number of ranks
keeps its losses to the last bit only if every sum is taken in one order. So `train_step` computes
loss and gradient for each sample alone, gathers them from all ranks in the order of the samples,
and then adds them up on every rank. A real run would not pay for that; it shows that the data is
the same.
"""

import os
from pathlib import Path

import torch
from tiny_data import GLOBAL_BATCH, PACK_LENGTH, VOCABULARY
from torch import distributed, nn

WIDTH = 16


def make_model() -> tuple["TinyGPT", torch.optim.Optimizer]:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = TinyGPT()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


class TinyGPT(nn.Module):
    """One transformer block, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(PACK_LENGTH, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits; with document ids, no token sees those of another document."""
        x = self.embedding(tokens) + self.positions(position_ids)
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if document_ids is not None:
            hidden = hidden | (document_ids[:, :, None] != document_ids[:, None, :])
        x = x + scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        return self.head(x + self.mlp(x))


def sample_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of each sample: [batch]."""
    logits = model(batch["tokens"], batch["position_ids"], batch.get("document_ids"))
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["loss_mask"]).sum(1) / batch["loss_mask"].sum(1)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> float:
    """One step on the global batch, of which this rank has `batch`; the global batch's loss."""
    parameters = list(model.parameters())
    rows = []
    for row in range(len(batch["tokens"])):
        sample = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        loss = sample_losses(model, sample).sum()
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([loss.detach()[None], *(g.flatten() for g in gradients)]))
    mean = in_sample_order(torch.stack(rows)).sum(0) / GLOBAL_BATCH
    gradients = mean[1:].split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    optimizer.step()
    return mean[0].item()


def in_sample_order(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks: rank r has the r-th part of each global batch."""
    if not distributed.is_initialized():
        return rows
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, rows)
    return torch.cat(parts)


def save_atomically(state: object, path: Path) -> None:
    """A checkpoint that a kill cannot leave half written."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


class Progress:
    """The number of steps done, as a state that torch.distributed.checkpoint saves."""

    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Moments:
    """An optimizer whose state exists before the first step, as the checkpoint's reader needs."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state_dict(self):
        return {
            str(number): state for number, state in self.optimizer.state_dict()["state"].items()
        }

    def load_state_dict(self, state):
        groups = self.optimizer.state_dict()["param_groups"]
        numbered = {int(number): entry for number, entry in state.items()}
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
