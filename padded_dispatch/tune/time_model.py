"""Time model: milliseconds from bytes and FLOPs, by five coefficients fitted to measured layers.

    ms = fixed + per_expert * L + wire bytes / wire + FLOPs / rate          padded experts
    ms = fixed +                  wire bytes / wire + FLOPs / rate          packed experts

This is the time of one MoE layer, forward and backward, in a CUDA graph: without a graph the host
decides, which no arithmetic on sizes predicts. `fixed` is all that does not grow with the factor,
for as many tokens as were measured. `per_expert` is the launches that padded experts need for each
of the L experts of a rank; packed ones need one for all. Copies within a rank are no separate term:
they grow as the wire does, and a sixth coefficient hardly reduced the errors.

The fit is linear least squares on relative errors. Coefficients that the rows do not separate stay
as near as can be to their start (the solution of least norm, relative to the start); `determined`
names those that the rows decide. A start value is a rate of single kernels on H200s, not of a
layer: take times that rest on one as a guess.

The shipped coefficients (`h200.json`) are of H200s; `padded-dispatch calibrate` fits others.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require
from padded_dispatch.tune.cost import Cost


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Coefficients of the model, in the units of their names: ms, GB/s and TFLOP/s."""

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
    """Work of one layer on one rank, forward and backward: the input of the model.

    `packed`: the FLOPs run at the rate of packed experts, else of padded ones. `num_launched`:
    experts whose products are launched one by one; 0 where one launch does all.
    """

    packed: bool
    num_launched: int
    wire_bytes: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured layer.

    `name`: of the contender. `num_ranks`: that exchanged rows (R). `num_tokens`: on each (T).
    `fits`: the row enters the fit; else it is only compared.
    """

    work: Work
    ms: float
    name: str
    num_ranks: int
    num_tokens: int
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class TimeModel:
    """Fitted coefficients and the measurements behind them.

    Args:
        coefficients: of the model.
        determined: names of those that the measured rows decide.
        sources: the runs that measured: machine, versions, command, commit, date, as in results
            files.
        num_rows: measured rows in the fit.
        num_ranks: ranks that exchanged rows (R), of these rows; others are extrapolated.
        num_tokens: on each rank (T), of these rows; others are extrapolated.
        errors: the largest error of a modelled time, relative to the measured one, by contender;
            also for rows outside the fit.
    """

    coefficients: Coefficients
    determined: tuple[str, ...]
    sources: tuple[dict[str, Any], ...]
    num_rows: int
    num_ranks: tuple[int, ...]
    num_tokens: tuple[int, ...]
    errors: dict[str, float]

    def ms(self, work: Work) -> float:
        """Return the modelled milliseconds of one layer, forward and backward."""
        return float(_terms(work) @ _inverses(self.coefficients))

    def layer_ms(
        self, cost: Cost, *, num_local_experts: int, packed: bool, network_gb_per_s: float = 50.0
    ) -> float:
        """Return the modelled milliseconds for a cost.

        Both levels of an all-to-all over hosts send at once, so the slower one decides; its bytes
        are turned into those that take as long inside a host. `network_gb_per_s`: see `tune.hosts`.
        """
        slowdown = self.coefficients.wire_gb_per_s / network_gb_per_s
        within = cost.wire_bytes - cost.network_bytes
        return self.ms(
            Work(
                packed=packed,
                num_launched=0 if packed else num_local_experts,
                wire_bytes=max(within, cost.network_bytes * slowdown),
                flops=cost.packed_flops if packed else cost.padded_flops,
            )
        )

    def describe(self) -> str:
        """Return the origin and the accuracy of the model, in a few sentences."""
        errors = ", ".join(f"{error:.1%} ({name})" for name, error in self.errors.items())
        text = (
            f"Times are modelled, not measured: fitted to {self.num_rows} rows of EP "
            f"{', '.join(map(str, self.num_ranks))} with "
            f"{', '.join(f'{num:,}' for num in self.num_tokens)} tokens per rank, measured on "
            f"{self._of_sources('machine')} ({self._of_sources('date')}, commit "
            f"{self._of_sources('commit')}); largest error on the rows there: {errors}. Other "
            "shapes, more ranks and other numbers of tokens are extrapolated."
        )
        guessed = [name for name in NAMES if name not in self.determined]
        if self.num_rows <= len(NAMES):
            text += " With so few rows, a small error on the fitted ones is weak evidence."
        if guessed:
            text += (
                f" The rows do not decide {', '.join(guessed)}, taken from single kernels instead: "
                "times that rest on them are a guess until `padded-dispatch calibrate` has run on "
                "your machine."
            )
        return text

    def _of_sources(self, name: str) -> str:
        return ", ".join(sorted({str(source[name]) for source in self.sources}))


def fit(measured: Sequence[Measured], sources: Sequence[dict[str, Any]]) -> TimeModel:
    """Fit the model by least squares on relative errors, from `START`.

    Raises:
        ValueError: no row fits the model, or the rows contradict it.
    """
    fitting = [row for row in measured if row.fits]
    require(fitting, "rows", 0, "hold a measured layer of ours", "measure packed or padded experts")
    start = _inverses(START)
    # One row per measured row, one column per coefficient.
    relative = np.stack([_terms(row.work) * start / row.ms for row in fitting])
    change, *_ = np.linalg.lstsq(relative, 1.0 - relative.sum(1), rcond=None)
    values = start * (1.0 + change)
    if (values <= 0).any():
        wrong = ", ".join(name for name, v in zip(NAMES, values, strict=True) if v <= 0)
        raise ValueError(f"rows must agree with the model, got {wrong} below 0; measure more rows")
    errors: dict[str, float] = {}
    for row in measured:
        error = abs(float(_terms(row.work) @ values) / row.ms - 1.0)
        errors[row.name] = max(error, errors.get(row.name, 0.0))
    return TimeModel(
        coefficients=_coefficients(values),
        determined=_determined(relative),
        sources=tuple(sources),
        num_rows=len(fitting),
        num_ranks=tuple(sorted({row.num_ranks for row in fitting})),
        num_tokens=tuple(sorted({row.num_tokens for row in fitting})),
        errors=errors,
    )


def save(model: TimeModel, path: Path) -> None:
    """Write the model as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(model), indent=1) + "\n")


def load(path: Path) -> TimeModel:
    """Read a file of `save`.

    Raises:
        ValueError: the file cannot be read, or has other content.
    """
    try:
        return _parse(path.read_text())
    except (OSError, TypeError, KeyError, ValueError) as error:
        reason = "not JSON" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"calibration must be a file of `padded-dispatch calibrate`, got {str(path)!r} "
            f"({reason}); give its path, or leave it out for H200s"
        ) from error


def shipped() -> TimeModel:
    """Return the model of H200s that comes with the package."""
    return _parse(resources.files("padded_dispatch.tune").joinpath("h200.json").read_text())


def _parse(text: str) -> TimeModel:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    coefficients = Coefficients(**raw.pop("coefficients"))
    if not all(isinstance(v, float) and v > 0 for v in vars(coefficients).values()):
        raise ValueError("coefficients must be numbers above 0")
    lists = {name: tuple(raw.pop(name)) for name in _LISTS}
    model = TimeModel(coefficients=coefficients, **lists, **raw)
    model.describe()  # Raises here, and not in the middle of a report, where something is missing.
    return model


def _terms(work: Work) -> NDArray[np.float64]:
    """Return the factor of each coefficient, or of its inverse, to give milliseconds."""
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
    """Return the values in which the model is linear: times as they are, rates inverted."""
    return np.array(
        [v if name.endswith("_ms") else 1.0 / v for name, v in vars(coefficients).items()]
    )


def _coefficients(values: NDArray[np.float64]) -> Coefficients:
    pairs = zip(NAMES, values.tolist(), strict=True)
    return Coefficients(**{n: v if n.endswith("_ms") else 1.0 / v for n, v in pairs})


def _determined(terms: NDArray[np.float64]) -> tuple[str, ...]:
    """Return the names whose change no change of the others can make up for.

    Their unit vectors lie in the span of the rows.
    """
    _, sizes, axes = np.linalg.svd(terms)
    rank = int((sizes > sizes[0] * 1e-9).sum())
    left_over = np.linalg.norm(axes[rank:], axis=0)
    return tuple(name for name, rest in zip(NAMES, left_over, strict=True) if rest < 1e-6)
