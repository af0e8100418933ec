"""Test text generation on GPUs, and write results rows.

    python -m tests.gpu.inference --out notebooks/results/recipes.json --commit SHA

Megatron's static engine prefills and decodes, in bf16, with a padded model whose capacity factor
drops rows in training. Its logits are compared with those of a stock dropless model, with and
without `local` CUDA graphs; see `tests.support.generation`. Ranks may have other numbers of
requests where no graph is replayed. One case sets `eval_factor`, and must drop rows and fail the
comparison: it shows that the check can fail.
The results file is complete after every case. `--only TEXT` runs the cases whose names contain the
text. `--cpu N` tries the program on N processes over gloo.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.generation import GenerationCase, drops, generates_as_stock
from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed

CHECK = "text generation equals stock"
DROPS = "text generation with a factor does not"

_GPU: dict[str, Any] = {
    "device": "cuda",
    "prompts": (96, 32, *(48, 64) * 3),
    "new_tokens": 24,
    "num_layers": 3,
    "hidden": 512,
    "heads": 8,
    "ffn": 256,
    "num_experts": 32,
    "top_k": 4,
    "vocab": 512,
}


def cases() -> Iterator[GenerationCase]:
    """Yield all cases: one rank, then two."""
    for ranks, experts, graphs in itertools.product(
        (1, 2), ("module", "packed", "batched", "auto"), (False, True)
    ):
        name = f"{experts}, EP{ranks}{', local graphs' * graphs}"
        how: dict[str, Any] = {"ranks": ranks, "experts": experts, **_GPU}
        yield GenerationCase(name=name, local_graphs=graphs, **how)
        if ranks > 1 and not graphs:
            yield GenerationCase(name=f"{name}, other T per rank", uneven=True, **how)


def on_cpu(case: GenerationCase) -> GenerationCase:
    """Return a small version of a case for the CPU."""
    default = {field.name: field.default for field in dataclasses.fields(GenerationCase)}
    return dataclasses.replace(case, **{name: default[name] for name in _GPU})


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    dropping = GenerationCase(name="packed, EP1, dropping", eval_factor=0.5, **_GPU)
    checks = [(CHECK, generates_as_stock, case) for case in cases()]
    checks.insert(0, (DROPS, drops, dropping))
    return run_cases(
        arguments,
        ENVIRONMENT,
        (
            (check, run, on_cpu(case) if arguments.cpu else case)
            for check, run, case in sorted(checks, key=lambda row: row[2].ranks)
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
