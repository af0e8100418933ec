"""Routing traces: the rows that routers asked for, in memory and on disk.

Which rows find room depends on counts alone, so a trace counts the rows of each expert.

A file is a sequence of arrays [layers, micro-batches], one for each recorded step, written by
`np.save` one behind the other. An element is one forward pass of one layer on one source rank.
Reading unpickles nothing, and leaves out what a killed process left incomplete.

A recording is several files, `rank-RANK-step-STEP.npy`, where STEP steps were done before. Of a
step that a resumed run repeated, the later file holds. A step that some rank of its group did not
record, such as the last one of a killed run, is left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import CapacityPool, require

_SETTINGS = ["num_tokens", "top_k", "num_ranks", "pool"]  # alike in all records


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Counts of rows. A pass is a micro-batch of a step in one group of source ranks.

    `num_tokens` (T), `top_k` (K): of a source in a pass. `steps`: [passes]. `layers`: [layers],
    their numbers, ascending. `counts`: [passes, layers, sources, experts], rows before anything is
    dropped. `pool`: the traced run's `capacity_pool`, None if it is not known. `num_left_out`:
    steps of a group that some of its ranks did not record.
    """

    num_tokens: int
    top_k: int
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    counts: NDArray[np.integer]
    pool: CapacityPool | None = None
    num_left_out: int = 0

    @property
    def num_sources(self) -> int:
        """Source ranks of a group."""
        return self.counts.shape[2]

    @property
    def num_experts(self) -> int:
        """Experts in all (E)."""
        return self.counts.shape[3]

    @property
    def mean_rows(self) -> float:
        """Rows of a (source, expert) in perfect balance."""
        return self.num_tokens * self.top_k / self.num_experts


def record_dtype(num_experts: int) -> np.dtype:
    """Return the fields of a record.

    `rank`: of the source; ranks 0 to `num_ranks` - 1 are one group, `num_ranks` and up the next.
    `pool`: the run's `capacity_pool`. `counts`: rows asked of each expert.
    """
    numbers = [(name, "<i4") for name in ("layer", "rank", "num_tokens", "top_k", "num_ranks")]
    return np.dtype([("step", "<i8"), *numbers, ("pool", "<U6"), ("counts", "<i4", (num_experts,))])


def load_trace(paths: Sequence[Path]) -> Demand:
    """Read a recording of several files, such as one per rank.

    Args:
        paths: files, and folders whose `*.npy` files are taken.

    Raises:
        ValueError: names the file, what is wrong in it, and what to do; or no step is complete.
        OSError: a file cannot be read.
    """
    files = [f for path in paths for f in (sorted(path.glob("*.npy")) if path.is_dir() else [path])]
    given = ", ".join(str(path) for path in paths)
    rule = "name each file of one recording once"
    require(len({file.name for file in files}) == len(files), "TRACE", given, rule)
    # By step and group, then by source and first layer: another pipeline stage has other layers.
    found: dict[tuple[int, int], dict[tuple[int, int], NDArray[np.void]]] = defaultdict(dict)
    first: NDArray[np.void] | None = None
    for file in files:
        for records_YM in _arrays(file):
            first = records_YM if first is None else first
            alike = (records_YM[_SETTINGS] == first[_SETTINGS][0, 0]).all()
            alike = alike and records_YM.dtype == first.dtype
            rule, fix = f"be those of {files[0]}", "give files of one recording"
            require(alike, f"{file}: settings", records_YM[_SETTINGS][0, 0], rule, fix)
            step, rank, layer = (int(records_YM[name][0, 0]) for name in ("step", "rank", "layer"))
            group, source = divmod(rank, int(records_YM["num_ranks"][0, 0]))
            found[step, group][source, layer] = records_YM
    if first is None:
        raise ValueError(
            f"{given} must hold a recorded step (*.npy), got none; give the folder of "
            "`train --trace`"
        )
    num_tokens, top_k, num_ranks, pool = first[_SETTINGS][0, 0].tolist()
    parts = [part for of_group in found.values() for part in of_group.values()]
    layers = np.unique(np.concatenate([part["layer"][:, 0] for part in parts]))
    shape = len(layers), num_ranks, first["counts"].shape[-1]
    steps, counts = [], []
    for (step, _), of_group in sorted(found.items()):
        if sum(map(len, of_group.values())) < len(layers) * num_ranks:
            continue
        num_passes = next(iter(of_group.values())).shape[1]
        steps += [step] * num_passes
        counts.append(np.empty((num_passes, *shape), np.int32))
        for (source, _), part in of_group.items():
            places = np.searchsorted(layers, part["layer"][:, 0])
            counts[-1][:, places, source] = part["counts"].swapaxes(0, 1)
    rule = f"have all {num_ranks} ranks of a group in some step"
    require(counts, "TRACE", given, rule, "give the files of all ranks")
    return Demand(
        num_tokens=num_tokens,
        top_k=top_k,
        steps=np.array(steps, np.int64),
        layers=layers,
        counts=np.concatenate(counts),
        pool=pool,
        num_left_out=len(found) - len(counts),
    )


def _arrays(file: Path) -> Iterator[NDArray[np.void]]:
    """Yield the complete arrays of a file: records [layers, micro-batches]."""
    with file.open("rb") as opened:
        while True:
            try:
                records_YM = np.load(opened, allow_pickle=False)
            except (EOFError, ValueError):
                return
            rule, fix = "be a trace", "give a file of `train --trace`"
            names = records_YM.dtype.names
            require(names == record_dtype(1).names, f"{file}", records_YM.dtype, rule, fix)
            yield records_YM
