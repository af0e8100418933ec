"""Show on one screen what each choice of a factor drops, costs, and did to the loss in studies.

A trace tells what a factor drops, and a time model what it costs. Neither tells what dropping does
to the loss. So each row cites a study in which at least as large a share was dropped: what cost
little there costs hardly more here. Studies differ in model, data and size: take them as a hint,
and train at two factors (`padded-dispatch sweep`) where it matters.
"""

from dataclasses import dataclass

import numpy as np

from padded_dispatch.tune.study import Option, Study
from padded_dispatch.tune.table import Table
from padded_dispatch.tune.target import percent

# A row of the menu is the smallest factor that drops no more than this.
_SHARES = (0.3, 0.1, 0.05, 0.03, 0.01, 0.001, 0.0)

SOURCES = {
    "a": "this project, notebooks/results/quality.json: loss in nats per byte beside no dropping, "
    "95 % confidence; tiny with 4 layers, 400 steps on an H200, 3 seeds",
    "b": "marin, JAX: equal loss in issue 8320, 64 GB200; +0.001 in issues 4016 and 4017, factor 1 "
    "instead of 1.25, which drops 7.4 % in the larger runs of issue 8320",
    "c": "ST-MoE, arXiv 2202.08906, table 5: SuperGLUE after fine-tuning; 86.7 with 0.3 % dropped",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A study's result where a share of the rows was `dropped`; `source` is one of `SOURCES`."""

    dropped: float
    effect: str
    source: str

    def __str__(self) -> str:
        return f"{percent(self.dropped)}: {self.effect} [{self.source}]"


FINDINGS = (
    Finding(dropped=0.008, effect="loss equal", source="b"),
    Finding(dropped=0.031, effect="-0.004 ± 0.015", source="a"),
    Finding(dropped=0.074, effect="+0.001 bits/byte", source="b"),
    Finding(dropped=0.095, effect="+0.002 ± 0.004", source="a"),
    Finding(dropped=0.106, effect="SuperGLUE 86.5", source="c"),
    Finding(dropped=0.283, effect="+0.017 ± 0.017", source="a"),
    Finding(dropped=0.512, effect="+0.064 ± 0.031", source="a"),
)


def finding(dropped: float) -> Finding | None:
    """Return the finding with the smallest share that is at least this; None beyond all studies.

    Example: 0.05 gives what 7.4 % did.
    """
    return next((found for found in FINDINGS if found.dropped >= dropped), None)


def choices(study: Study) -> tuple[Option, ...]:
    """Return the options worth showing, the recommended one among them."""
    chosen = {study.training.overall.factor}
    for share in _SHARES:
        enough = [option.factor for option in study.options if option.dropped <= share]
        chosen.update(enough[:1])
    return tuple(option for option in study.options if option.factor in chosen)


def menu(study: Study) -> Table:
    """Return the table of choices; the recommended one is marked."""
    shown = choices(study)
    columns = {
        "factor": [f"{option.factor:g}" for option in shown],
        "slots": [str(option.capacity) for option in shown],
        "dropped": [percent(option.dropped) for option in shown],
        f"{percent(study.question.target.steps_share)} steps": [
            f"<= {percent(_dropped_in_most_steps(study, option))}" for option in shown
        ],
    }
    if study.layer is not None:
        columns["ms"] = [f"{option.packed_ms:.2f}" for option in shown]
        columns["GiB"] = [f"{option.memory_gib:.3g}" for option in shown]
    columns["in studies"] = [_in_studies(option) for option in shown]
    return Table(
        headers=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        marked=[option.factor for option in shown].index(study.training.overall.factor),
    )


def pool_table(study: Study) -> Table:
    """Return a row for each kind of pool that was compared; the recommended one is marked.

    Bytes per factor are the same for all kinds. With one factor, pools that more rows share drop
    fewer of them.
    """
    cells = []
    for answer in study.pools:
        advice = answer.training.overall
        cells.append(
            (
                answer.pool,
                f"{advice.factor:g}",
                "yes" if advice.promised else "no",
                percent(answer.dropped),
                percent(answer.retried),
                f"{np.ceil(answer.needed * 100) / 100:g}",
            )
        )
    headers = ("pool", "factor", "promised", "dropped", "steps retried", "drops nothing at")
    pools = [answer.pool for answer in study.pools]
    return Table(headers=headers, rows=tuple(cells), marked=pools.index(study.pool))


def notes(study: Study) -> list[str]:
    """Return the meaning of the columns and the sources of the findings that the menu cites."""
    found = [finding(option.dropped) for option in choices(study) if option.dropped]
    cited = sorted({cited.source for cited in found if cited is not None})
    share = percent(study.question.target.steps_share)
    texts = [
        f"{share} steps: what this share of the steps does not exceed. In studies: what dropping "
        "at least this share did to the loss."
    ]
    if study.layer is not None:
        texts.append("ms, modelled: one layer, forward and backward, packed experts. GiB: a rank.")
    return texts + [f"[{letter}] {SOURCES[letter]}." for letter in cited]


def _in_studies(option: Option) -> str:
    if not option.dropped:
        return "nothing dropped"
    found = finding(option.dropped)
    return "beyond all of them" if found is None else str(found)


def _dropped_in_most_steps(study: Study, option: Option) -> float:
    """Return the share that the target's share of the steps seen does not exceed."""
    rows = study.replay.by_layer_and_step()
    demand = rows.demand.sum(0)
    asked = demand > 0
    dropped = rows.dropped[int(np.argmax(study.replay.factors == option.factor))].sum(0)
    shares = dropped[asked] / demand[asked]
    return float(np.quantile(shares, study.question.target.steps_share, method="higher"))
