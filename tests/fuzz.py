"""Compare the package with what shares no code with it, over as many random cases as asked for.

    python -m tests.fuzz --examples 2000

A case is one forward and backward pass of all ranks through one to
three layers: a store, cells that our experts read, or padded ones; any policy, capacity factor,
alignment and activation; with or without recompute; padding tokens; no row, one, an odd number. One
process holds all ranks, as threads with real collectives. Unused memory is NaN.
`tests/support/reference.py` says what must come out. Each example has the seed of its number.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter

import torch

from padded_dispatch import Activation, DispatchConfig
from tests import conftest  # noqa: F401  # It sets up the interpreter.
from tests.support.rows import Rows, add_results, parse
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
    pool = rng.choice(["store", "store", "expert", "padded"])
    config = DispatchConfig(
        num_experts=num_experts,
        top_k=rng.randint(1, min(3, num_experts)),
        capacity_factor=rng.choice(FACTORS),  # pyright: ignore
        alignment=rng.choice([1, 1, 3, 4]),
        capacity_pool="store" if pool == "store" else "expert",
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


def fuzz(first: int, num_examples: int, seen: Counter[str]) -> tuple[int, str | None]:
    """Check examples until one fails.

    Returns:
        How many examples ran, and the failure, if there was one; `seen` counts what they were.
    """
    for number in range(first, first + num_examples):
        case, pool, recompute = draw(number)
        config = case.config
        try:
            check(case, pool, recompute)
        except Exception as error:
            cause = error.__cause__ or error
            given = f"{config}, {pool}, {recompute}, {case.tokens_STD.shape}"
            return number - first + 1, f"{type(cause).__name__}: {cause}; example {number}: {given}"
        seen.update([pool, config.policy, f"factor {config.capacity_factor}"])
        seen.update([f"{len(case.layers)} layers", f"R {config.num_ranks}, S {config.num_sources}"])
    return num_examples, None


def main() -> None:
    """Fuzz, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000, help="default: 2000")
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start none later")
    add_results(parser, required=False)
    arguments = parse(parser)
    torch.set_num_threads(1)
    start, failures, seen = time.monotonic(), [], Counter()
    number, last, seconds = arguments.first, arguments.first + arguments.examples, 0.0
    while number < last and seconds < arguments.seconds:
        ran, failure = fuzz(number, min(100, last - number), seen)
        number += ran
        if failure is not None:
            failures.append(failure)
        seconds = time.monotonic() - start
        words = f"{number - arguments.first} examples, {len(failures)} failures, {seconds:.0f} s"
        sys.stdout.write(words + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(sorted(seen.items()))}\n")
    sys.stdout.writelines(f"{failure}\n" for failure in failures)
    if arguments.out:
        row = {"check": "random cases", "name": "dispatcher", "examples": number - arguments.first}
        row |= {"passed": not failures, "failures": failures, "seconds": round(seconds, 1)}
        Rows(arguments, 0).add(row)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
