"""Test fp8 under CUDA graphs that hold experts, on GPUs, and write results rows.

    python -m tests.gpu.fp8 --out notebooks/results/recipes.json --commit SHA

For each scaling that Hopper has (tensorwise, delayed, blockwise), on one GPU and on two:

- Trainings with graphs run in lockstep with an eager one: graphs of whole layers by `LayerGraphs`
  and by Megatron's own helper, Megatron's local ones, one of full iterations. All losses,
  gradients, parameters and counts are the same, bit by bit, in 100 replays.
- A layer is at parity with stock's dropless one in fp8.
- A graphed layer of Qwen3-30B-A3B is timed beside stock's graphed drop-and-pad in fp8, and both in
  bf16.

The results file is complete after every case. `--only TEXT` runs the cases whose names contain the
text. `--cpu N` tries the program on N processes over gloo, where nothing quantizes.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.quantized_training import (
    RECIPES,
    ParityCase,
    QuantizedCase,
    SpeedCase,
    graphed_equals_eager,
    graphed_time,
    parity_with_stock,
)
from tests.support.retried_training import EAGER_STEPS, RetriedCase

Check = tuple[str, Callable[[Any], Any], Any]

REPLAYS = 100
EQUAL = "fp8: graphed training equals eager training"
PARITY = "fp8: parity with stock dropless"
SPEED = "fp8: milliseconds of a graphed layer"

_GPU: dict[str, Any] = {
    "device": "cuda",
    "batch": 1,
    "seq": 256,
    "hidden": 512,
    "heads": 8,
    "ffn": 512,
    "num_experts": 4,
    "top_k": 2,
    "vocab": 512,
}
# Blockwise scaling needs widths that are multiples of 128.
_LAYER = {"num_experts": 16, "top_k": 4, "hidden": 256, "ffn": 256, "seq": 130}


def checks() -> Iterator[Check]:
    """Yield all checks: one rank, then two."""
    for ranks in (1, 2):
        for recipe, graph in itertools.product(RECIPES, ("layer", "local", "full-iteration")):
            # A layer's graph is replayed in both microbatches of a step.
            replays = REPLAYS if graph == "full-iteration" else REPLAYS // 2
            where: dict[str, Any] = {"ranks": ranks, "ep": ranks, "graph": graph, **_GPU}
            where |= {"steps": EAGER_STEPS + replays, "num_layers": 2 if graph == "layer" else 1}
            name = f"fp8 {recipe}, EP{ranks}, graph {graph}"
            yield EQUAL, graphed_equals_eager, QuantizedCase(name=name, recipe=recipe, **where)
        for recipe in RECIPES:
            name = f"fp8 {recipe}, EP{ranks}, parity"
            case = ParityCase(name=name, recipe=recipe, ranks=ranks, sizes=_LAYER)
            yield PARITY, parity_with_stock, case
        for contender, recipe in _contenders(ranks):
            name = f"{f'fp8 {recipe}' if recipe else 'bf16'}, EP{ranks}, time of {contender}"
            how = {"contender": contender, "recipe": recipe, "ranks": ranks}
            yield SPEED, graphed_time, SpeedCase(name=name, **how)


def _contenders(ranks: int) -> Iterator[tuple[str, str | None]]:
    """Yield contenders that are timed, with their recipes; fewer of them on two ranks."""
    for recipe in RECIPES if ranks == 1 else ("tensorwise",):
        yield from (("module-graphed", recipe), ("drop-pad-graphed", recipe))
    yield from (("auto-graphed", None), ("module-graphed", None), ("drop-pad-graphed", None))


def on_cpu(case: Any) -> Any:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it."""
    if isinstance(case, SpeedCase):
        eager = case.contender.removesuffix("-graphed")
        small = {"model": "tiny", "tokens": 16, "iterations": 1, "repeats": 1}
        return dataclasses.replace(case, device="cpu", contender=eager, **small)
    if isinstance(case, ParityCase):
        return dataclasses.replace(case, device="cpu", sizes={})
    if case.graph != "layer":
        return None
    default = {field.name: field.default for field in dataclasses.fields(RetriedCase)}
    small = {name: default[name] for name in _GPU} | {"steps": EAGER_STEPS + 2}
    return dataclasses.replace(case, **small)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    wanted = (
        (check, run, on_cpu(case) if arguments.cpu else case) for check, run, case in checks()
    )
    return run_cases(arguments, ENVIRONMENT, wanted)


if __name__ == "__main__":
    sys.exit(main())
