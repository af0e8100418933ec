"""Count promises that break, over many kinds of processes.

    python -m tests.tune.promises --out notebooks/results/promises.json --commit SHA

Each run draws a series of needs, leaves out the warm-up of its first steps, shows the rest of them
to `recommend`, and looks at what follows where a promise is made. `broken_next` counts runs in
which more of the steps that the promise covers whatever comes drop too much than chance explains,
if 1 % do; `broken_later` runs in which more than 1 % of the steps of the next ten traces do. No GPU
is needed, but a quarter of an hour on two cores.
"""

import argparse
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.tune.recommend import Recommendation, Target, recommend
from padded_dispatch.tune.replay import Replay
from padded_dispatch.tune.stationarity import num_allowed
from padded_dispatch.tune.study import grid
from padded_dispatch.tune.warm_up import num_warm_up
from padded_dispatch.utils.results import about, append_run, require_results
from tests.tune.processes import HIDDEN, INDEPENDENT, MIXING, SLOW, Kind, Needs

TARGET = Target(drop=0.001)
NUM_LATER = 10  # traces that follow
ROWS = 10_000  # that a step asks for
GROUPS = {"independent": INDEPENDENT, "mixing": MIXING, "slow": SLOW, "hidden": HIDDEN}


def replay_of(needs: Needs) -> Replay:
    """Return a replay in which each step needs the given factor and drops what exceeds a factor."""
    factors = np.array(grid(needs.max()))
    num_steps = len(needs)
    kept = np.minimum(1.0, factors[:, None] / needs) * ROWS
    return Replay(
        pool="expert",
        num_ranks=1,
        factors=factors,
        capacities=np.ceil(factors * 100).astype(np.int64),
        slots=factors * ROWS,
        steps=np.arange(num_steps),
        layers=np.ones(num_steps, np.int32),
        ranks=np.zeros(num_steps, np.int32),
        demand_by_expert=np.full((num_steps, 1), ROWS, np.int32),
        kept_by_expert=kept.astype(np.int32)[:, :, None],
        asked_mass=None,
        kept_mass=None,
        num_tokens=np.full(num_steps, ROWS, np.int32),
        lost_tokens=np.zeros((len(factors), num_steps), np.int32),
        needed_factor=needs,
    )


def settled(needs: Needs) -> Needs:
    """Return the needs after the warm-up, as the command leaves it out."""
    return needs[num_warm_up(1 - np.minimum(1.0, 1.0 / needs)) :]


def recommend_from(needs: Needs) -> Recommendation:
    """Return what the tuner recommends for steps with these needs."""
    return recommend(replay_of(needs), TARGET)


def try_kind(name: str, kind: Kind, *, num_steps: int, num_runs: int) -> dict[str, Any]:
    """Return how many runs of a kind were promised something, and how many of these broke."""
    promised = broken_next = broken_later = 0
    over_later = []
    for run in range(num_runs):
        random = np.random.default_rng([zlib.crc32(name.encode()), num_steps, run])
        needs = np.maximum(0.5, kind(random, num_steps, num_steps * (1 + NUM_LATER)))
        advice = recommend_from(settled(needs[:num_steps])).overall
        if not advice.promised:
            continue
        promised += 1
        dropped = 1 - np.minimum(1.0, advice.factor / needs[num_steps:])
        over = dropped > TARGET.drop
        covered = over[: advice.steps_covered]
        broken_next += int(covered.sum() > num_allowed(len(covered), TARGET.steps_share))
        if over.mean() > 1 - TARGET.steps_share:
            broken_later += 1
            over_later.append(dropped.mean())
    return {
        "check": "promises",
        "kind": name,
        "group": next(group for group, kinds in GROUPS.items() if name in kinds),
        "steps": num_steps,
        "runs": num_runs,
        "promised": promised,
        "broken_next": broken_next,
        "broken_later": broken_later,
        "dropped_where_broken_later": float(np.mean(over_later)) if over_later else None,
        "passed": broken_next <= 0.05 * num_runs,
    }


def main(argv: list[str]) -> int:
    """Try all kinds; the exit code is 1 if one of them breaks more than 5 % of its promises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    given = parser.parse_args(argv)
    if given.out is not None:
        require_results("--out", given.out)
    run_about = about(
        num_gpus=0,
        command=" ".join(["python -m tests.tune.promises", *argv]),
        commit=given.commit,
    )
    passed = True
    kinds = {name: kind for group in given.groups for name, kind in GROUPS[group].items()}
    for num_steps in given.steps:
        for name, kind in kinds.items():
            row = try_kind(name, kind, num_steps=num_steps, num_runs=given.runs)
            passed = passed and row["passed"]
            if given.out is not None:
                append_run(given.out, run_about, [row])
            sys.stdout.write(
                f"{num_steps:5}  {name:36}  promised {row['promised']:3}  broken next "
                f"{row['broken_next']:3}  later {row['broken_later']:3}\n"
            )
            sys.stdout.flush()
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
