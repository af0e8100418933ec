"""A trace: which experts every token asked for, in some layers, at some steps, on some ranks.

A record is one pass of one layer on one source rank. Where a step has several passes
(micro-batches), its records of a (layer, rank) lie in the order of the passes. Arrays over records
start with N; the other letters are those of `padded_dispatch.config`.

Every trace has one normal form: a token's choices are in ascending expert order, then -1. That is
the order in which the dispatcher sees them, it makes a duplicate impossible to write down, and two
traces are equal when their arrays are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require

MAX_EXPERTS = 2**15 - 1  # ids are int16


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What routers asked for, before anything was dropped.

    Args:
        num_experts: experts in all (E).
        top_k: most experts of a token (K).
        num_ranks: source ranks that share an expert-parallel group (R); ranks 0 to R - 1 are one
            group, R to 2R - 1 the next.
        steps: int64 [N], the training step of each record.
        layers: int32 [N], the number of its MoE layer.
        ranks: int32 [N], its source rank.
        ids_NTK: int16 [N, T, K], experts in ascending order; then -1, for a padding token and for
            one with fewer than K experts.
        probs_NTK: float32 [N, T, K], their probabilities, finite, and 0 where the id is -1; None
            where nobody recorded them.

    Raises:
        ValueError: names the array, a value, where it is, and what to change.
    """

    num_experts: int
    top_k: int
    num_ranks: int
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    ranks: NDArray[np.int32]
    ids_NTK: NDArray[np.int16]
    probs_NTK: NDArray[np.float32] | None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_experts", 1, MAX_EXPERTS),
            ("top_k", 1, self.num_experts),
            ("num_ranks", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            require(least <= value <= most, name, value, f"give a number from {least} to {most}")
        shape = self.ids_NTK.shape
        require(
            len(shape) == 3 and min(shape) >= 1 and shape[2] == self.top_k,
            "ids_NTK.shape",
            shape,
            f"give [N, T, K] with at least one record, one token, and K = {self.top_k}",
        )
        arrays = {
            "steps": (self.steps, np.dtype(np.int64), shape[:1]),
            "layers": (self.layers, np.dtype(np.int32), shape[:1]),
            "ranks": (self.ranks, np.dtype(np.int32), shape[:1]),
            "ids_NTK": (self.ids_NTK, np.dtype(np.int16), shape),
        }
        if self.probs_NTK is not None:
            arrays["probs_NTK"] = (self.probs_NTK, np.dtype(np.float32), shape)
        for name, (array, dtype, expected) in arrays.items():
            actual = f"{array.dtype}{list(array.shape)}"
            require(
                array.dtype == dtype and array.shape == expected,
                name,
                actual,
                f"give {dtype}{list(expected)}",
            )
        for name in ("steps", "layers", "ranks"):
            _check(name, getattr(self, name), getattr(self, name) < 0, "give 0 or more")
        self._check_choices()

    @property
    def num_records(self) -> int:
        """Records (N)."""
        return self.ids_NTK.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of a record, padding included (T)."""
        return self.ids_NTK.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.steps, self.layers, self.ranks, self.ids_NTK, self.probs_NTK)
        return sum(array.nbytes for array in arrays if array is not None)

    def passes(self) -> NDArray[np.int64]:
        """[N], which pass of its step each record is: how often its (step, layer, rank) was before.

        Example: four records of one layer, steps 3, 3, 3, 4 on ranks 0, 1, 0, 0 give 0, 0, 1, 0.
        """
        keys_3N = np.stack([self.steps, self.layers, self.ranks])
        of_N = np.unique(keys_3N, axis=1, return_inverse=True)[1].reshape(-1)
        return running_count(of_N)

    def where(self, chosen_N: NDArray[np.bool_]) -> "Trace":
        """The records for which `chosen_N` is True, in their order."""
        return Trace(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_ranks=self.num_ranks,
            steps=self.steps[chosen_N],
            layers=self.layers[chosen_N],
            ranks=self.ranks[chosen_N],
            ids_NTK=self.ids_NTK[chosen_N],
            probs_NTK=None if self.probs_NTK is None else self.probs_NTK[chosen_N],
        )

    def _check_choices(self) -> None:
        """Record by record, so that the check needs no memory of the trace's size."""
        for n, ids_TK in enumerate(self.ids_NTK):
            where = f"ids_NTK[{n}]"
            _check(
                where,
                ids_TK,
                (ids_TK < -1) | (ids_TK >= self.num_experts),
                f"give -1 or an expert below num_experts={self.num_experts}",
            )
            # As unsigned numbers, -1 is the largest: it may follow every expert, and itself.
            unsigned_TK = ids_TK.view(np.uint16)
            before, after = unsigned_TK[:, :-1], unsigned_TK[:, 1:]
            unordered = (before >= after) & (after != 2**16 - 1)
            _check(
                where,
                ids_TK[:, 1:],
                unordered,
                "give every expert of a token once, in ascending order, then -1; `ascending` sorts",
                offset=1,
            )
            if self.probs_NTK is not None:
                probs_TK = self.probs_NTK[n]
                where = f"probs_NTK[{n}]"
                _check(where, probs_TK, ~np.isfinite(probs_TK), "give finite probabilities")
                _check(
                    where, probs_TK, (ids_TK < 0) & (probs_TK != 0), "give 0 where there is no id"
                )


def ascending(
    ids: NDArray[np.int16], probs: NDArray[np.float32] | None
) -> tuple[NDArray[np.int16], NDArray[np.float32] | None]:
    """Sort every token's choices as a trace wants them: by expert, then -1. Shapes [..., K]."""
    order = np.argsort(ids.view(np.uint16), axis=-1, kind="stable")
    sorted_probs = None if probs is None else np.take_along_axis(probs, order, axis=-1)
    return np.take_along_axis(ids, order, axis=-1), sorted_probs


def merge(traces: Sequence[Trace], names: Sequence[object] | None = None) -> Trace:
    """One trace of several, for example of one per rank: records by step, pass, layer and rank.

    Probabilities are kept where all parts have them. `names`: of the parts, for errors.

    Raises:
        ValueError: the parts do not belong together, or hold the same (step, layer, rank) twice.
    """
    names = [f"part {i}" for i in range(len(traces))] if names is None else names
    first = traces[0]
    for part, of_part in zip(traces, names, strict=True):
        for name in ("num_experts", "top_k", "num_ranks", "num_tokens"):
            value, expected = getattr(part, name), getattr(first, name)
            remedy = f"all parts must have {expected}, as {names[0]} has"
            require(value == expected, f"{of_part}: {name}", value, remedy)
    keys = [np.stack([part.steps, part.layers, part.ranks]) for part in traces]
    distinct = np.concatenate([np.unique(key_3N, axis=1) for key_3N in keys], axis=1)
    times = np.unique(distinct, axis=1, return_counts=True)
    if (times[1] > 1).any():
        twice_3 = times[0][:, times[1] > 1][:, 0]
        step, layer, rank = twice_3.tolist()
        both = [
            str(name)
            for key_3N, name in zip(keys, names, strict=True)
            if (key_3N == twice_3[:, None]).all(0).any()
        ]
        raise ValueError(
            f"step {step}, layer {layer}, rank {rank} is in {' and '.join(both)}: give every "
            "recording once"
        )
    passes_N = np.concatenate([part.passes() for part in traces])
    steps_N, layers_N, ranks_N = np.concatenate(keys, axis=1)
    order_N = np.lexsort((ranks_N, layers_N, passes_N, steps_N))
    probs = [part.probs_NTK for part in traces]
    known = [probs_NTK for probs_NTK in probs if probs_NTK is not None]
    return Trace(
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_ranks=first.num_ranks,
        steps=steps_N[order_N],
        layers=layers_N[order_N].astype(np.int32),
        ranks=ranks_N[order_N].astype(np.int32),
        ids_NTK=np.concatenate([part.ids_NTK for part in traces])[order_N],
        probs_NTK=np.concatenate(known)[order_N] if len(known) == len(probs) else None,
    )


def running_count(of_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """[N], how often each value was there before.

    Example: 7, 5, 7, 7 gives 0, 0, 1, 2.
    """
    order_N = np.argsort(of_N, kind="stable")
    starts_N = np.ones(len(of_N), bool)
    starts_N[1:] = np.diff(of_N[order_N]) != 0
    positions_N = np.arange(len(of_N))
    first_N = np.maximum.accumulate(np.where(starts_N, positions_N, 0))
    count_N = np.empty(len(of_N), np.int64)
    count_N[order_N] = positions_N - first_N
    return count_N


def _check(name: str, array: NDArray, wrong: NDArray, remedy: str, *, offset: int = 0) -> None:
    """Raise for the first element that is `wrong`; `offset` is what its last index lacks."""
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        *others, last = (int(i) for i in index)
        place = ", ".join(str(i) for i in (*others, last + offset))
        require(False, f"{name}[{place}]", array[index].item(), remedy)
