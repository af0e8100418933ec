"""Counts of the rows that sources asked of experts, from which a trace is replayed.

Letters: T tokens of a source and micro-batch; K experts per token; E experts; R ranks of experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.trace import Records, Trace, TracedRun

_MOST_NAMED = 8  # missing ranks


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Counts of rows. A pass is a micro-batch of a step in one group of source ranks.

    `run`: see `Trace`. `steps`: [passes]. `layers`: [layers], their numbers, ascending. `counts`:
    [passes, layers, sources, experts], rows before anything is dropped. `trace`: the records that
    were counted; None if only counts are known.
    """

    run: TracedRun
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    counts: NDArray[np.integer]
    trace: Records | None = None

    @property
    def mean_rows(self) -> float:
        """Rows of a (source, expert) in perfect balance."""
        return self.run.num_tokens * self.run.top_k / self.run.num_experts


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedTrace(Records):
    """The rows of each record for each expert, `counts_NE`: far less memory than a trace."""

    counts_NE: NDArray[np.int32]


def counted(trace: Trace) -> CountedTrace:
    """Count the rows of each record of a trace."""
    counts_NE = np.zeros((len(trace.steps), trace.run.num_experts), np.int32)
    for n, ids_TK in enumerate(trace.ids_NTK):
        counts_NE[n] = np.bincount(ids_TK[ids_TK >= 0], minlength=trace.run.num_experts)
    return CountedTrace(
        run=trace.run,
        steps=trace.steps,
        layers=trace.layers,
        ranks=trace.ranks,
        counts_NE=counts_NE,
    )


def demand_of(trace: Trace | CountedTrace) -> Demand:
    """Return the demand of a trace, or of what was counted of it."""
    of = counted(trace) if isinstance(trace, Trace) else trace
    steps, _ = _passes(of)
    return Demand(
        run=of.run,
        steps=steps,
        layers=np.unique(of.layers),
        counts=_placed(of, of.counts_NE),
        trace=of,
    )


def missing_ranks(trace: Records) -> str:
    """Return a warning if ranks of a group did not trace all layers of a step, else nothing."""
    num_ranks = trace.run.num_ranks
    keys = np.unique(np.stack([trace.steps, trace.layers, trace.ranks]), axis=1)
    steps, layers, ranks = keys
    groups = ranks // num_ranks
    _, num_traced = np.unique(np.stack([steps, groups]), axis=1, return_counts=True)
    num_partly = int((num_traced < num_ranks * len(np.unique(layers))).sum())
    if not num_partly:
        return ""
    expected = (np.unique(groups)[:, None] * num_ranks + np.arange(num_ranks)).flatten()
    missing = [str(rank) for rank in np.setdiff1d(expected, ranks)]
    what = (
        f"{num_partly:,} of {len(num_traced):,} steps lack some of their {num_ranks} ranks or "
        f"{len(np.unique(layers))} layers"
    )
    if missing:
        names = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
        what = f"Traces of {len(missing)} of {len(expected)} ranks are missing ({names})"
    counted = "rows are not counted, and a store needs more than this"
    return f"{what}, so {counted}; give the traces of all ranks."


def _passes(trace: Records) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the step of every pass, and the pass of every record."""
    keys = np.stack([trace.steps, trace.microbatches, trace.ranks // trace.run.num_ranks])
    passes, pass_of_record = np.unique(keys, axis=1, return_inverse=True)
    return passes[0], pass_of_record.reshape(-1)


def _placed(trace: Records, values: NDArray[Any]) -> NDArray[Any]:
    """Return values of records, [N, ...], by (pass, layer, source); 0 without a record."""
    steps, pass_of_record = _passes(trace)
    layers, layer_of_record = np.unique(trace.layers, return_inverse=True)
    num_ranks = trace.run.num_ranks
    placed = np.zeros((len(steps), len(layers), num_ranks, *values.shape[1:]), values.dtype)
    placed[pass_of_record, layer_of_record, trace.ranks % num_ranks] = values
    return placed
