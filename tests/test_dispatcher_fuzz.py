"""Random cases of the dispatcher beside the oracle, which shares no code with it.

    python -m tests.test_dispatcher_fuzz 0 2000

checks the cases from 0 to 2,000. One is a forward and backward pass of all ranks through one to
three layers: a store, cells that our experts read, or padded ones; any policy, capacity factor,
alignment and activation; with or without recompute; padding tokens; no row, one, an odd number. One
process holds all ranks, as threads with real collectives. Unused memory is NaN.
`tests/support/reference.py` says what must come out. Each case has the seed of its number.
"""

import math
import random
import sys

import pytest
import torch

from padded_dispatch import Activation, DispatchConfig
from tests import conftest  # noqa: F401  # It sets up the interpreter.
from tests.support.whole_layers import ROUTINGS, Case, check, make_case

FACTORS = 0.2, 0.4, 0.5, 0.7, 1.0, 1.25, 2.0, 4.0, math.inf, "fit"
# One rank is the cheapest world; expert tensor parallelism doubles the sources.
WORLDS = [(1, 1)] * 4 + [(2, 1), (1, 2), (3, 1), (2, 2), (5, 1), (8, 1)]
ACTIVATIONS = (
    Activation(),
    Activation(function="gelu", clamp=0.5),
    Activation(function="quick_gelu", clamp=0.8, offset=1.0),
    Activation(function="squared_relu", gated=False),
)


def draw(number: int) -> tuple[Case, str, str]:
    """Draw a case, its pool, and how it is recomputed."""
    rng = random.Random(number)
    num_ranks, etp_size = rng.choice(WORLDS)
    num_experts = num_ranks * rng.randint(1, 4)
    pool = rng.choice(["store", "store", "cells", "padded"])
    config = DispatchConfig(
        num_experts=num_experts,
        top_k=rng.randint(1, min(3, num_experts)),
        capacity_factor=rng.choice(FACTORS),  # pyright: ignore
        alignment=rng.choice([1, 1, 3, 4]),
        capacity_pool="store" if pool == "store" else "cells",
        policy=rng.choice(["probs", "position"]),
        num_ranks=num_ranks,
        etp_size=etp_size,
    )
    case = make_case(
        config,
        rng.choices(ROUTINGS, k=rng.randint(1, 3)),
        num_tokens=rng.choice([1, 2, 3, 4, 5, 6, 7, 9, 13]),
        hidden=rng.randint(1, 4),
        ffn=rng.randint(1, 3),
        activation=rng.choice(ACTIVATIONS),
        biased=rng.random() < 0.5,
        seed=number,
    )
    return case, pool, rng.choice(["", "", "", "reentrant", "other"])


@pytest.mark.parametrize("number", range(20261123, 20261183))
def test_some_examples(number):
    check(*draw(number))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for example in range(*map(int, sys.argv[1:])):
        sys.stdout.write(f"\r{example}")  # Before the traceback, if it fails.
        check(*draw(example))
