"""The specification of the package: NumPy, over all ranks in one process.

It computes everything between the router and the combined output, as slowly and plainly as
possible, and shares nothing with the code that it specifies.

The rules. A row is a pair (token, expert) of a source; place p means that it is the p-th row of its
source for that expert, by token. Which rows count:

- cells: each (source, expert) keeps its first C rows in the policy's order;
- between hosts: the ranks of one number on their hosts, whose tokens come one host after the
  other, count as one source; a token's rows are summed on each host, and then the hosts' sums;
- the store: a rank's layers take rows one after the other, and where none are left, the last ones
  of those before. If the rows of one layer exceed the store's, each (expert, source) keeps those
  with places below w, the largest w with which they fit.

Every row that counts adds `prob * (fc2(f(fc1(token) + bias)) + bias)` to its token, summed over the
shards of its expert. Other rows add nothing, and have no gradient.

Letters as in `config`. S = I * R sources, of which source `i * R + r` is rank r of the i-th
expert-parallel group; I shards of each expert. Y layers, in the order of a pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray]


def select(map_TE: NDArray, probs_TE: NDArray, *, capacity: int, policy: str) -> NDArray:
    """Return the map of at most C rows of each expert: the first ones in the policy's order."""
    kept_TE = np.zeros_like(map_TE)
    for e in range(map_TE.shape[1]):
        rows = [
            (-probs_TE[t, e] if policy == "probs" else 0, t) for t in np.flatnonzero(map_TE[:, e])
        ]
        for _, t in sorted(rows)[:capacity]:
            kept_TE[t, e] = True
    return kept_TE


def plan(map_TE: NDArray, *, top_k: int) -> Arrays:
    """Number the rows of each expert by token; a token has at most K rows, of its first experts.

    The names are those of `padded_dispatch.routing.Plan`.
    """
    num_tokens, num_experts = map_TE.shape
    expert_TK = np.full((num_tokens, top_k), -1, np.int32)
    place_TK = np.full((num_tokens, top_k), -1, np.int32)
    kept_E = np.zeros(num_experts, np.int32)
    for t in range(num_tokens):
        for k, e in enumerate(np.flatnonzero(map_TE[t])[:top_k]):
            expert_TK[t, k], place_TK[t, k] = e, kept_E[e]
            kept_E[e] += 1
    if any(map_TE.sum(1) > top_k):
        kept_E[:] = -(2**24)  # For all ranks to see.
    return {"expert_TK": expert_TK, "place_TK": place_TK, "kept_E": kept_E}


def water_level(count_SL: NDArray, space: int) -> float:
    """Return the largest w with which the first w rows of each (expert, source) fit."""
    if count_SL.sum() <= space:
        return math.inf
    w = 0
    while np.minimum(count_SL, w + 1).sum() <= space:
        w += 1
    return w


@dataclass
class Store:
    """The store of one rank: rows that it holds and what each layer did."""

    rows: int
    asked_Y: list[int] = field(default_factory=list)
    base_Y: list[int] = field(default_factory=list)
    again_Y: list[int] = field(default_factory=list)
    top: int = 0

    def keep(self, count_SL: NDArray) -> float:
        """Return the level of the next layer, and remember its rows."""
        level = water_level(count_SL, self.rows)
        num_rows = int(np.minimum(count_SL, level).sum())
        self.asked_Y.append(int(count_SL.sum()))
        self.base_Y.append(min(self.top, self.rows - num_rows))
        self.again_Y.append(self.top - self.base_Y[-1])
        self.top = self.base_Y[-1] + num_rows
        return level

    @property
    def low(self) -> int:
        """The row from which on rows are overwritten."""
        pairs = zip(self.base_Y, self.again_Y, strict=True)
        return min([self.rows, *(base for base, again in pairs if again)])

    @property
    def need(self) -> int:
        """Rows of a store that would have held every layer so far."""
        return sum(self.asked_Y)


def found_room(map_STE: NDArray, levels_R: Sequence[float]) -> NDArray:
    """Return the rows of the maps that are below the level of their expert's rank."""
    levels_E = np.repeat(levels_R, map_STE.shape[2] // len(levels_R))
    place_STE = map_STE.cumsum(1) - 1
    return map_STE & (place_STE < levels_E)


def counts(map_STE: NDArray, rank: int, num_ranks: int) -> NDArray:
    return map_STE.sum(1).reshape(len(map_STE), num_ranks, -1)[:, rank]


def hosts(machines: str) -> NDArray:
    """Return the ranks of each host, [H, G]: those with one letter, in parts of one size.

    The size is the largest that divides the number of every letter.
    """
    size = max(
        n for n in range(1, len(machines) + 1) if all(machines.count(m) % n == 0 for m in machines)
    )
    parts = []
    for letter in dict.fromkeys(machines):
        ranks = [rank for rank, of_rank in enumerate(machines) if of_rank == letter]
        parts += [ranks[i : i + size] for i in range(0, len(ranks), size)]
    return np.array(parts)


def merged(map_STE: NDArray, ranks_HG: NDArray) -> NDArray:
    """Return the maps that the ranks of a host send inside of it, [G, H * T, E]: of their rails."""
    return np.concatenate([map_STE[ranks_G] for ranks_G in ranks_HG], axis=1)


def apart(map_GTE: NDArray, ranks_HG: NDArray) -> NDArray:
    """Return the maps of all ranks, [S, T, E]: the opposite of `merged`."""
    of_hosts = np.split(map_GTE, len(ranks_HG), axis=1)
    map_STE = np.concatenate(of_hosts)
    map_STE[ranks_HG.flatten()] = np.concatenate(of_hosts)
    return map_STE


def sum_at_home(
    rows_KD: Sequence[NDArray], hosts_K: Sequence[int], num_hosts: int, rounded: Any
) -> NDArray:
    """Add the rows of a token in fp32: those of each host, in the order of experts, rounded once.

    Then the hosts' sums, rounded once. `rounded` rounds fp32 to the dtype of tokens.
    """
    total_D = np.zeros(rows_KD[0].shape, np.float32)
    for host in range(num_hosts):
        of_host_D = np.zeros_like(total_D)
        for row_D, there in zip(rows_KD, hosts_K, strict=True):
            if there == host:
                of_host_D = of_host_D + row_D
        total_D = total_D + rounded(of_host_D)
    return rounded(total_D)


def layer(
    tokens_STD: NDArray, probs_STE: NDArray, rows_STE: NDArray, weights: Arrays, activation: Any
) -> NDArray:
    """Compute a layer, [S, T, D], of the rows that count.

    Weights have the names of `ExpertWeights`, and are of all shards and experts: [I, E, ...].
    """
    out_STD = np.zeros_like(tokens_STD)
    for e, here, of_shards in _experts(rows_STE, weights):
        for given in of_shards:
            out_STD[here] += _Mlp(tokens_STD[here], probs_STE[*here, e], given, activation).out
    return out_STD


def layer_backward(
    tokens_STD: NDArray,
    probs_STE: NDArray,
    rows_STE: NDArray,
    weights: Arrays,
    activation: Any,
    grad_STD: NDArray,
) -> tuple[NDArray, NDArray, Arrays]:
    grad_tokens_STD, grad_probs_STE = np.zeros_like(tokens_STD), np.zeros_like(probs_STE)
    grads = {name: np.zeros_like(value) for name, value in weights.items()}
    for e, here, of_shards in _experts(rows_STE, weights):
        for i, given in enumerate(of_shards):
            mlp = _Mlp(tokens_STD[here], probs_STE[*here, e], given, activation)
            grad_rows, grad_probs, of_weights = mlp.backward(grad_STD[here])
            grad_tokens_STD[here] += grad_rows
            grad_probs_STE[*here, e] += grad_probs
            for name, value in of_weights.items():
                grads[name][i, e] = value
    return grad_tokens_STD, grad_probs_STE, grads


def _experts(rows_STE: NDArray, weights: Arrays) -> Iterator[tuple[int, Any, list[Arrays]]]:
    """Yield each expert, the (source, token) of its rows, and the weights of its shards."""
    num_shards = len(weights["fc1_LGD"])
    for e in range(rows_STE.shape[2]):
        of_shards = [
            {name: value[i, e] for name, value in weights.items()} for i in range(num_shards)
        ]
        yield e, np.nonzero(rows_STE[..., e]), of_shards


class _Mlp:
    """One shard of one expert on its rows [n, D] with probabilities [n]."""

    def __init__(self, rows: NDArray, probs: NDArray, weights: Arrays, activation: Any) -> None:
        self.rows, self.probs, self.weights = rows, probs[:, None], weights
        self.activation = activation
        self.fc1 = rows @ weights["fc1_LGD"].T + weights.get("fc1_bias_LG", 0)
        self.gate, self.up = self.fc1, None
        if activation.gated:
            self.gate, self.up = np.split(self.fc1, 2, axis=1)
        self.value, self.slope = _curve(
            activation.function, np.minimum(self.gate, activation.clamp)
        )
        self.linear = np.ones_like(self.gate)
        if self.up is not None:
            clamp = activation.clamp
            self.linear = np.clip(self.up, -clamp, clamp) + activation.offset
        self.hidden = self.value * self.linear
        self.plain = self.hidden @ weights["fc2_LDF"].T + weights.get("fc2_bias_LD", 0)
        self.out = self.probs * self.plain

    def backward(self, grad: NDArray) -> tuple[NDArray, NDArray, Arrays]:
        grad_plain = grad * self.probs
        grad_hidden = grad_plain @ self.weights["fc2_LDF"]
        below = self.gate <= self.activation.clamp
        grad_fc1 = np.where(below, grad_hidden * self.linear * self.slope, 0)
        if self.up is not None:
            inside = np.abs(self.up) <= self.activation.clamp
            grad_up = np.where(inside, grad_hidden * self.value, 0)
            grad_fc1 = np.concatenate([grad_fc1, grad_up], axis=1)
        grads = {
            "fc1_LGD": grad_fc1.T @ self.rows,
            "fc2_LDF": grad_plain.T @ self.hidden,
            "fc1_bias_LG": grad_fc1.sum(0),
            "fc2_bias_LD": grad_plain.sum(0),
        }
        grads = {name: value for name, value in grads.items() if name in self.weights}
        return grad_fc1 @ self.weights["fc1_LGD"], (grad * self.plain).sum(1), grads


def _curve(function: str, x: NDArray) -> tuple[NDArray, NDArray]:
    if function == "squared_relu":
        return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)
    if function == "gelu":
        below = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x * math.sqrt(0.5)))
        return x * below, below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    scale = 1.702 if function == "quick_gelu" else 1.0
    sigmoid = 1 / (1 + np.exp(-scale * x))
    return x * sigmoid, sigmoid * (1 + scale * x * (1 - sigmoid))


def cells(
    tokens_STD: NDArray,
    probs_STE: NDArray,
    rows_STE: NDArray,
    *,
    capacity: int,
    rank: int,
    num_ranks: int,
) -> tuple[NDArray, NDArray, NDArray]:
    """Return what the experts of a rank read in padded cells, each source's rows by token.

    Rows [L, S, C, D] and probabilities [L, S, C] are 0 in padded rows; a map [L, S, C] is True in
    real ones.
    """
    num_sources, _, num_experts = rows_STE.shape
    local = num_experts // num_ranks
    shape = local, num_sources, capacity
    rows_LSCD = np.zeros((*shape, tokens_STD.shape[2]), tokens_STD.dtype)
    probs_LSC, is_real_LSC = np.zeros(shape, probs_STE.dtype), np.zeros(shape, bool)
    for own, source in np.ndindex(local, num_sources):
        e = rank * local + own
        for c, t in enumerate(np.flatnonzero(rows_STE[source, :, e])):
            rows_LSCD[own, source, c] = tokens_STD[source, t]
            probs_LSC[own, source, c] = probs_STE[source, t, e]
            is_real_LSC[own, source, c] = True
    return rows_LSCD, probs_LSC, is_real_LSC
