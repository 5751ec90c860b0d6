"""Packs: whole documents in rows of a fixed number of tokens, in a shuffled order of their own.

The documents are shuffled and cut into windows, and each window is packed: best fit, the longest
first. That is done once; every epoch takes the same packs in another permutation. "Document" is
Megatron-LM's word here: what is packed are the sequences of the token file.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from millrace import _native
from millrace.checks import MAX_INT32, MAX_INT64, check_bool, check_choice, check_int, check_ints
from millrace.deferred import Deferred, cached_property
from millrace.errors import ConfigError, DataError
from millrace.files import checksum
from millrace.order.order_plans import NOT_IN_KEY, Arrays, Layout, OrderInputs
from millrace.order.spans import RULES_VERSION, CoreOrder
from millrace.ragged import even_sizes, spread, starts_of

_MAX_CAPACITY = 1 << 26  # packing takes 8 bytes for each number of tokens that a pack may have left
_OPTIONS = ("long_documents", "in_order", "window_documents", "window_packs", "multiple")
LONG_DOCUMENTS = ("error", "cut", "split", "drop")


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """The plan of packs of whole documents: an `OrderPlan`, `order: millrace.order:PackPlan`.

    Attributes:
        capacity: Tokens of a pack: the sequence length, and the extra token if samples have one.
        num_samples: Number of samples; they count through the epochs.
        num_packs: Number of packs, which are the samples of one epoch.
        num_pieces: Number of documents, and of parts of documents that are split, in all packs.
        num_tokens: Number of tokens in all packs, without padding.
        num_long: Number of documents that are longer than a pack.
        num_lost_tokens: Number of tokens of these that no pack has.
        long_documents: What becomes of documents that are longer than a pack: "error", "cut" (their
            rest is lost), "split" (into parts that are packed like documents) or "drop".
        in_order: Whether to pack documents as they are stored, the next pack beginning with the
            first one that does not fit; else by best fit in windows of the shuffled documents.
        window_documents, window_packs: Least size of a window: so many documents, or documents
            worth so many packs if these are more. Larger windows leave less padding.
        multiple: Number of tokens to whose multiples the trainer pads documents; packs have room
            for the padding.
    """

    capacity: int
    num_samples: int = field(default=0, metadata=NOT_IN_KEY)
    num_packs: int = field(default=0, metadata=NOT_IN_KEY)
    num_pieces: int = field(default=0, metadata=NOT_IN_KEY)
    num_tokens: int = field(default=0, metadata=NOT_IN_KEY)
    num_long: int = field(default=0, metadata=NOT_IN_KEY)
    num_lost_tokens: int = field(default=0, metadata=NOT_IN_KEY)
    long_documents: str = "error"
    in_order: bool = False
    window_documents: int = 10_000
    window_packs: int = 1_000
    multiple: int = 1

    def __post_init__(self) -> None:
        plain = {"capacity": check_int("the capacity of packs", self.capacity, 1, _MAX_CAPACITY)}
        for name in ("window_documents", "window_packs", "multiple"):
            plain[name] = check_int(name, getattr(self, name), 1, MAX_INT32)
        vars(self).update(plain, in_order=check_bool("in_order", self.in_order))
        check_choice("long_documents", self.long_documents, LONG_DOCUMENTS)
        if self.capacity % self.multiple != 0:
            raise ConfigError(
                f"a pack of {self.capacity} tokens must be a multiple of {self.multiple}; it "
                "is the sequence length, and one token more without add_extra_token=False"
            )

    @classmethod
    def of(cls, inputs: OrderInputs, **options: Any) -> "PackPlan":
        """The plan of packs of the inputs' sequence length; `options` are those of the class.

        Raises:
            ConfigError: An option outside its limits, documents that are longer than a pack, or no
                document at all.
            DataError: Lengths of more tokens than the token file holds.
        """
        return cls._planned(inputs, **options)[0]

    @classmethod
    def _planned(cls, inputs: OrderInputs, **options: Any) -> tuple["PackPlan", Arrays]:
        """The plan, and its arrays: counting packs is making them."""
        capacity = inputs.sequence_length + inputs.add_extra_token
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ConfigError(f"packs have no option {unknown[0]}; they have {', '.join(_OPTIONS)}")
        plan = cls(capacity=capacity, **options)
        start, stop = inputs.sequences
        if stop > 2**32:
            raise ConfigError(f"packs take at most 2**32 documents of a token file, not {stop}")
        lengths, total = inputs.lengths[start:stop], inputs.count_tokens()
        if lengths.min(initial=0) < 0:
            raise DataError("a length is negative: the index is damaged; write the pair again")
        num_long = int(np.count_nonzero(lengths > capacity))
        long = f"{num_long} of {stop - start} documents"
        if num_long > 0 and plan.long_documents == "error":
            raise ConfigError(
                f"{long} ({num_long / (stop - start):.2%}) have "
                f"more than {capacity} tokens, up to {lengths.max()}. Choose longer packs, or "
                'long_documents "cut", "split" or "drop"'
            )
        pieces, sizes = plan._pieces(inputs)
        if len(pieces) == 0:
            raise ConfigError(
                f"no document can be packed: {long} have more than {capacity} tokens, the others "
                "none. Give this split more documents, or none at all"
            )
        packs = plan._pack(pieces, sizes, inputs.seed)
        num_packs, num_tokens = len(packs["pack_index"]), int(sizes.sum(dtype=np.int64))
        plan = replace(
            plan,
            num_samples=num_packs if inputs.num_samples is None else inputs.num_samples,
            num_packs=num_packs,
            num_pieces=len(packs["piece_index"]),
            num_tokens=num_tokens,
            num_long=num_long,
            num_lost_tokens=total - num_tokens,
        )
        return plan, packs

    def arrays(self, inputs: OrderInputs) -> Layout:
        dtype = np.int64 if self.long_documents == "split" and self.num_long > 0 else np.uint32
        return {
            "piece_index": (dtype, (self.num_pieces,)),
            "pack_index": (np.int64, (self.num_packs,)),
        }

    def build(self, inputs: OrderInputs) -> Arrays:
        return self._pack(*self._pieces(inputs), inputs.seed)

    def load(self, inputs: OrderInputs, arrays: Deferred[Arrays]) -> "PackedOrder":
        order = object.__new__(PackedOrder)
        order.plan, order.inputs, order._arrays = self, inputs, arrays
        return order

    def _pieces(self, inputs: OrderInputs) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """What is packed, and number of tokens of each.

        A piece is the number of its sequence; with "split", which piece of it stands in the high 32
        bits. The first pieces of all sequences come first, then the others of each.
        """
        start, stop = inputs.sequences
        lengths = inputs.lengths[start:stop]
        is_long = lengths > self.capacity
        sizes: NDArray[np.int32] = np.minimum(lengths, np.int32(self.capacity))
        if self.long_documents == "drop":
            sizes[is_long] = 0
        pieces = np.flatnonzero(sizes)
        sizes, pieces = sizes[pieces], pieces + start
        if self.long_documents != "split" or not is_long.any():
            return pieces.astype(np.uint32), sizes
        rests = lengths[is_long].astype(np.int64) - self.capacity
        counts = -(-rests // self.capacity)
        rows, places = spread(counts)
        rest_sizes = np.minimum(rests[rows] - places * self.capacity, self.capacity)
        others = (start + np.flatnonzero(is_long))[rows] | (places + 1) << 32
        return np.append(pieces, others), np.append(sizes, rest_sizes.astype(np.int32))

    def _pack(self, pieces: NDArray[Any], sizes: NDArray[np.int32], seed: int) -> Arrays:
        sizes, room = -(-sizes // self.multiple), self.capacity // self.multiple
        if self.in_order:
            return {"piece_index": pieces, "pack_index": _ends_in_order(sizes, room)}
        worth = self.window_packs * room * len(pieces) // int(sizes.sum(dtype=np.int64))
        num_windows = max(len(pieces) // max(self.window_documents, worth), 1)
        packed, ends, (key, _) = np.empty_like(pieces), [], _keys(seed)
        for start, stop in pairwise(starts_of(even_sizes(len(pieces), num_windows)).tolist()):
            places = np.arange(start, stop)
            places = _native.swap_or_not(places, len(pieces), key, True)
            order, window_ends = _native.pack(sizes[places], room)
            packed[start:stop] = pieces[places[order]]
            ends.append(start + window_ends)
        return {"piece_index": packed, "pack_index": np.concatenate(ends)}


def _ends_in_order(sizes: NDArray[np.int32], room: int) -> NDArray[np.int64]:
    """Ends of packs of pieces in their order: one that does not fit begins the next pack."""
    sums = np.cumsum(sizes, dtype=np.int64)
    # For each piece, the end of a pack that begins with it.
    end_of = np.searchsorted(sums, sums - sizes + room, side="right")
    ends, end = [], 0
    while end < len(sizes):
        end = int(end_of[end])
        ends.append(end)
    return np.array(ends, np.int64)


class PackedOrder(CoreOrder):
    """Whole documents in packs, which every epoch takes in another permutation.

    Args:
        lengths: Number of tokens of each document: integers [documents].
        capacity: Number of tokens of a pack.
        seed: Seed of both permutations, of the documents and of the packs of each epoch.
        num_samples: Number of samples; None: one epoch.
        options: See `PackPlan`.

    Raises:
        ConfigError: See `PackPlan.of`.

    Example:
        >>> order = PackedOrder([5, 3, 8, 2, 6], 8, seed=1)
        >>> spans = order.spans([0, 1, 2])
        >>> [part.tolist() for part in np.split(spans.sequences, spans.bounds[1:-1])]
        [[1, 0], [2], [4, 3]]
    """

    plan: PackPlan
    inputs: OrderInputs
    _arrays: Deferred[Arrays]
    _lengths_checksum: str | None = None

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        seed: int,
        *,
        num_samples: int | None = None,
        **options: Any,
    ) -> None:
        numbers = check_ints("lengths", lengths)
        if numbers.size > 0:
            check_int("a length", int(numbers.min()), 0)
            check_int("a length", int(numbers.max()), 0, MAX_INT32)
        if num_samples is not None:
            num_samples = check_int("num_samples", num_samples, 0, MAX_INT64)
        own = numbers.astype(np.int32)  # a copy: the caller's array may change
        self.inputs = OrderInputs(
            num_sequences=len(own),
            num_tokens=int(numbers.sum()),
            sequences=(0, len(own)),
            num_samples=num_samples,
            sequence_length=check_int("capacity", capacity, 1, _MAX_CAPACITY),
            add_extra_token=False,
            drop_last_partial_sequence=True,
            seed=check_int("seed", seed, 0),
            load_lengths=partial(np.asarray, own),
        )
        self.plan, arrays = PackPlan._planned(self.inputs, **options)
        self._arrays = Deferred.of(arrays)
        self._lengths_checksum = checksum([own])

    def __len__(self) -> int:
        return self.plan.num_samples

    @cached_property
    def core(self) -> _native.Order:
        plan, arrays = self.plan, self._arrays.value
        return _native.PackOrder(
            self.inputs.lengths,
            arrays["piece_index"],
            arrays["pack_index"],
            plan.capacity,
            plan.num_samples,
            _keys(self.inputs.seed)[1],
        )

    def epochs(self, num_samples: int) -> float:
        """Epochs that so many samples are."""
        return num_samples / max(self.plan.num_packs, 1)

    def fingerprint(self, consumed_samples: int | None = None) -> dict[str, Any]:
        """What decides the spans: the same for any number of samples."""
        values = asdict(self.plan)
        del values["num_samples"]
        if self._lengths_checksum is not None:  # in a run, the token file tells its lengths
            values["lengths"] = self._lengths_checksum
        return {
            "kind": "packs",
            "rules": RULES_VERSION,
            "sequences": list(self.inputs.sequences),
            "seed": self.inputs.seed,
            **values,
        }


def _keys(seed: int) -> tuple[int, int]:
    """The keys of the permutations of the documents and of the packs."""
    documents, packs = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return documents, packs
