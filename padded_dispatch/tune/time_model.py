"""From bytes and FLOPs to milliseconds: five coefficients, fitted to measured layers.

    ms = fixed + per_expert * L + wire bytes / wire + FLOPs / rate          padded experts
    ms = fixed +                  wire bytes / wire + FLOPs / rate          packed experts

for one MoE layer, forward and backward, in a CUDA graph: without one the host decides, which no
arithmetic on sizes foretells. `fixed` is all that does not grow with the factor, for as many tokens
as were measured; `per_expert` is the launches that padded experts need for each of their experts,
packed ones do all in one. Copies within a rank are not a term of their own: they grow as the wire
does, and a sixth coefficient made the errors hardly smaller.

The fit is linear least squares on relative errors. Rows that do not tell some coefficients apart
leave these where they started, as near as can be (the solution of least norm, relative to the
start); `determined` names those that the rows decide. A start value is a rate of single kernels
on H200s, not of a layer: take times that rest on one as a guess.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.tune.cost import Cost


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Milliseconds, GB/s and TFLOP/s, as the names say."""

    fixed_ms: float
    per_expert_ms: float
    wire_gb_per_s: float
    padded_tflop_per_s: float
    packed_tflop_per_s: float


NAMES = tuple(field.name for field in fields(Coefficients))
_LISTS = ("determined", "sources", "num_ranks", "num_tokens")  # in JSON; tuples here

# NCCL's equal-split all-to-all of 134 MB over 8 H200, and GEMMs of experts on one: kernels alone.
START = Coefficients(
    fixed_ms=1.0,
    per_expert_ms=0.02,
    wire_gb_per_s=296.0,
    padded_tflop_per_s=700.0,
    packed_tflop_per_s=650.0,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the model takes the time of: one layer's, forward and backward, on one rank.

    `packed`: whose rate the FLOPs have. `num_launched`: experts whose products are launched one by
    one; 0 where one launch does all.
    """

    packed: bool
    num_launched: int
    wire_bytes: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured layer.

    `name`: whose. `num_ranks`: that exchanged rows (R). `num_tokens`: on each (T). `fits`: the
    model is of this one; else it is compared.
    """

    work: Work
    ms: float
    name: str
    num_ranks: int
    num_tokens: int
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Coefficients and where they come from.

    Args:
        coefficients: of the model.
        determined: names of those that the measured rows decide.
        sources: the runs that measured: machine, versions, command, commit, date, as in results
            files.
        num_rows: measured rows that the fit saw.
        num_ranks: ranks that exchanged rows (R), of these rows; beyond them it is extrapolated.
        num_tokens: on each rank (T), of these rows; likewise.
        errors: the largest error of a modelled time, relative to the measured one, by who was
            measured; also for rows that the fit did not see.
    """

    coefficients: Coefficients
    determined: tuple[str, ...]
    sources: tuple[dict[str, Any], ...]
    num_rows: int
    num_ranks: tuple[int, ...]
    num_tokens: tuple[int, ...]
    errors: dict[str, float]

    def ms(self, work: Work) -> float:
        """Modelled milliseconds of one layer, forward and backward."""
        return float(_terms(work) @ _inverses(self.coefficients))

    def layer_ms(self, cost: Cost, *, num_local_experts: int, packed: bool) -> float:
        """The same for a cost."""
        flops = cost.packed_flops if packed else cost.padded_flops
        return self.ms(
            Work(
                packed=packed,
                num_launched=0 if packed else num_local_experts,
                wire_bytes=cost.wire_bytes,
                flops=flops,
            )
        )

    def describe(self) -> str:
        """Where the numbers come from and what they are worth, in a few sentences."""
        errors = ", ".join(f"{error:.1%} ({name})" for name, error in self.errors.items())
        text = (
            f"Times are modelled, not measured: calibrated on {self.num_rows} rows of EP "
            f"{', '.join(map(str, self.num_ranks))} with "
            f"{', '.join(f'{num:,}' for num in self.num_tokens)} tokens per rank, measured on "
            f"{self._of_sources('machine')} ({self._of_sources('date')}, commit "
            f"{self._of_sources('commit')}); largest error on the rows there: {errors}. Other "
            "shapes, more ranks and other numbers of tokens are extrapolated."
        )
        guessed = [name for name in NAMES if name not in self.determined]
        if self.num_rows <= len(NAMES):
            text += " With so few rows, a small error on those that were fitted says little."
        if guessed:
            text += (
                f" They do not decide {', '.join(guessed)}, taken from single kernels instead: "
                "what rests on that is a guess until `padded-dispatch calibrate` has run on your "
                "machine."
            )
        return text

    def _of_sources(self, name: str) -> str:
        return ", ".join(sorted({str(source[name]) for source in self.sources}))


def fit(measured: Sequence[Measured], sources: Sequence[dict[str, Any]]) -> Calibration:
    """Least squares on relative errors, from `START`.

    Raises:
        ValueError: without rows that fit, or when they contradict the model.
    """
    fitting = [row for row in measured if row.fits]
    if not fitting:
        raise ValueError("rows=0 is not possible: no measured row is one of the model's")
    start = _inverses(START)
    relative_NP = np.stack([_terms(row.work) * start / row.ms for row in fitting])
    change_P, *_ = np.linalg.lstsq(relative_NP, 1.0 - relative_NP.sum(1), rcond=None)
    values = start * (1.0 + change_P)
    if (values <= 0).any():
        wrong = ", ".join(name for name, v in zip(NAMES, values, strict=True) if v <= 0)
        raise ValueError(f"rows contradict the model: {wrong} came out below 0; measure more rows")
    errors: dict[str, float] = {}
    for row in measured:
        error = abs(float(_terms(row.work) @ values) / row.ms - 1.0)
        errors[row.name] = max(error, errors.get(row.name, 0.0))
    return Calibration(
        coefficients=_coefficients(values),
        determined=_determined(relative_NP),
        sources=tuple(sources),
        num_rows=len(fitting),
        num_ranks=tuple(sorted({row.num_ranks for row in fitting})),
        num_tokens=tuple(sorted({row.num_tokens for row in fitting})),
        errors=errors,
    )


def save(calibration: Calibration, path: Path) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration), indent=1) + "\n")


def load(path: Path) -> Calibration:
    """Read what `save` wrote.

    Raises:
        ValueError: for anything else.
    """
    try:
        return _parse(path.read_text())
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"calibration={path} is not possible: {error}") from error


def shipped() -> Calibration:
    """The one for H200s that comes with the package."""
    return _parse(resources.files("padded_dispatch.tune").joinpath("h200.json").read_text())


def _parse(text: str) -> Calibration:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    coefficients = Coefficients(**raw.pop("coefficients"))
    if not all(isinstance(v, float) and v > 0 for v in vars(coefficients).values()):
        raise ValueError("coefficients are numbers above 0")
    lists = {name: tuple(raw.pop(name)) for name in _LISTS}
    calibration = Calibration(coefficients=coefficients, **lists, **raw)
    calibration.describe()  # Complete, or it raises here and not in the middle of a report.
    return calibration


def _terms(work: Work) -> NDArray[np.float64]:
    """What each coefficient, or its inverse, is multiplied by: [P], in milliseconds' units."""
    return np.array(
        [
            1.0,
            work.num_launched,
            work.wire_bytes / 1e6,  # ms times GB/s
            0.0 if work.packed else work.flops / 1e9,  # ms times TFLOP/s
            work.flops / 1e9 if work.packed else 0.0,
        ]
    )


def _inverses(coefficients: Coefficients) -> NDArray[np.float64]:
    """The model is linear in these: times as they are, rates inverted."""
    return np.array(
        [v if name.endswith("_ms") else 1.0 / v for name, v in vars(coefficients).items()]
    )


def _coefficients(values_P: NDArray[np.float64]) -> Coefficients:
    pairs = zip(NAMES, values_P.tolist(), strict=True)
    return Coefficients(**{n: v if n.endswith("_ms") else 1.0 / v for n, v in pairs})


def _determined(terms_NP: NDArray[np.float64]) -> tuple[str, ...]:
    """Those that no change of the others can make up for: unit vectors in the rows' span."""
    _, sizes, axes_PP = np.linalg.svd(terms_NP)
    rank = int((sizes > sizes[0] * 1e-9).sum())
    left_over_P = np.linalg.norm(axes_PP[rank:], axis=0)
    return tuple(name for name, rest in zip(NAMES, left_over_P, strict=True) if rest < 1e-6)
