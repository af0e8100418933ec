"""Compare the package with what shares no code with it, over as many random cases as asked for.

    python -m tests.fuzz --examples 2000
    python -m tests.fuzz --examples 300 --of kernels
    python -m tests.fuzz --examples 400 --of layers

Of the dispatcher and its store, a case is one forward and backward pass of all ranks through one to
three layers: a store, cells that our experts read, or padded ones; any policy, capacity factor,
alignment and activation; with or without recompute; padding tokens; no row, one, an odd number. One
process holds all ranks, as threads with real collectives. Unused memory is NaN.
`tests/support/reference.py` says what must come out. Of kernels, a case is a pass of packed experts
in Triton's interpreter, beside fp64; of layers, one of Megatron's beside stock and fp64, on one or
two processes. Each example has the seed of its number.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from padded_dispatch import Activation, DispatchConfig
from tests import conftest  # noqa: F401  # It sets up the interpreter.
from tests.support.pool import WorkerPool
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


# What is compared, the case, and words for what it is.
Example = tuple[Callable[[], Any], Any, list[str]]


def dispatcher(number: int) -> Example:
    case, pool, recompute = draw(number)
    config = case.config
    words = [pool, config.policy, f"factor {config.capacity_factor}", f"{len(case.layers)} layers"]
    words.append(f"R {config.num_ranks}, S {config.num_sources}")
    shown = config, pool, recompute, case.tokens_STD.shape
    return partial(check, case, pool, recompute), shown, words


def kernels(number: int) -> Example:
    from tests.experts.test_packed import Case, any_dtype, test_a_pass_beside_the_plain_one

    rng = random.Random(number)
    ranks, exchange = rng.choice([1, 1, 2, 2, 3, 4]), rng.choice(["alltoall", "direct"])
    case = Case(
        ranks=ranks,
        routings=tuple(rng.choices(ROUTINGS, k=rng.randint(1, 3))),
        factor=rng.choice(FACTORS[:-1]),  # pyright: ignore
        exchange=exchange if ranks > 1 else "alltoall",
        activation=rng.choice(ACTIVATIONS),
        biased=rng.random() < 0.5,
        sums=rng.random() < 0.5,
        delayed=rng.random() < 0.3,
        tokens=rng.randint(1, 9),
        local_experts=rng.randint(2, 4),
    )

    def run() -> None:
        with contextmanager(any_dtype.__wrapped__)():
            test_a_pass_beside_the_plain_one(case, scaled=False)

    return run, case, [f"R {ranks}", case.exchange, f"factor {case.factor}"]


_pools: dict[int, WorkerPool] = {}


def layers(number: int) -> Example:
    from tests.support.layer_parity import LayerCase, PaddedOptions, layer_agrees

    rng = random.Random(number)
    ranks, sizes = rng.choice(
        [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"tp": 2, "ep": 2}), (2, {"tp": 2, "etp": 2})]
    )
    top_k, shared = rng.randint(1, 4), rng.choice([None, 16])
    routing = "one expert" if top_k == 1 else "idle rank" if "ep" in sizes else "random"
    experts = rng.choice(["module", "packed"])
    case = LayerCase(
        **sizes,
        num_experts=8,
        top_k=top_k,
        hidden=rng.choice([12, 16, 24]),
        ffn=rng.choice([10, 16]),
        shared_ffn=shared,
        shared_score=shared is not None and rng.random() < 0.5,
        gpt_oss=rng.random() < 0.3,  # Without biases, which SequentialMLP adds in place.
        seq=2 * rng.randint(4, 10),
        batch=rng.randint(1, 4),
        routing=rng.choice(["random", routing]),
        options=PaddedOptions(experts=experts),  # pyright: ignore
    )

    def run() -> None:
        pool = _pools.setdefault(ranks, WorkerPool(ranks))
        broken = pool.run(layer_agrees, case, timeout_s=120)[0].broken
        assert not broken, broken

    return run, case, [f"{ranks} ranks, {sizes}", experts, f"K {top_k}", case.routing]


def fuzz(
    first: int, num_examples: int, seen: Counter[str], of: Callable[[int], Example] = dispatcher
) -> tuple[int, str | None]:
    """Check examples until one fails.

    Returns:
        How many examples ran, and the failure, if there was one; `seen` counts what they were.
    """
    for number in range(first, first + num_examples):
        run, given, words = of(number)
        try:
            run()
        except Exception as error:
            cause = error.__cause__ or error
            return number - first + 1, f"{type(cause).__name__}: {cause}; example {number}: {given}"
        seen.update(words)
    return num_examples, None


def main() -> None:
    """Fuzz, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000, help="default: 2000")
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start none later")
    kinds = {kind.__name__: kind for kind in (dispatcher, kernels, layers)}
    parser.add_argument("--of", choices=kinds, default="dispatcher", help="default: dispatcher")
    add_results(parser, required=False)
    arguments = parse(parser)
    torch.set_num_threads(1)
    start, failures, seen = time.monotonic(), [], Counter()
    number, last, seconds = arguments.first, arguments.first + arguments.examples, 0.0
    while number < last and seconds < arguments.seconds:
        ran, failure = fuzz(number, min(100, last - number), seen, kinds[arguments.of])
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
        row = {"check": "random cases", "name": arguments.of, "examples": number - arguments.first}
        row |= {"passed": not failures, "failures": failures, "seconds": round(seconds, 1)}
        Rows(arguments, 0).add(row)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
