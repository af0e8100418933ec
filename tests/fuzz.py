"""Compare the dispatcher with a small program of lists, over as many random cases as asked for.

    python -m tests.fuzz --examples 20000

A case is one forward and backward pass of all ranks of a layer: any pool, policy, layout, dtype,
capacity factor and alignment; padding tokens; no token, one, an odd number.
One process holds all ranks, as threads with real collectives. Rows that hold no token are NaN: in
fresh memory, in the experts' output, and in the gradients that experts return. See
`tests/support/fuzz_oracle.py` for what must come out.

The examples are made in blocks; each has a seed of its own.
"""

import argparse
import math
import sys
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.dispatcher import Dispatched
from tests.support import fuzz_oracle
from tests.support.fuzz_oracle import Answer, Case, cases
from tests.support.grids import poisoned_memory
from tests.support.threads import run_on_threads

_BLOCK = 500


def check(case: Case) -> None:
    """Run a case on all its ranks, and compare all that each rank finds.

    Raises:
        AssertionError: names what differs.
    """
    found = fuzz_oracle.answers(case) if case.num_tokens else []
    with poisoned_memory():
        if len(case.sources) == 1:
            _on_rank(case, found)
        else:
            run_on_threads(len(case.sources), _on_rank, case, found)


def _on_rank(case: Case, found: list[Answer]) -> None:
    source = dist.get_rank() if dist.is_initialized() else 0
    dispatcher = _dispatcher(case)
    if case.num_tokens:
        _Pass(case, found, source).check(dispatcher)
        return
    try:
        _dispatch(case, source, dispatcher)
    except ValueError as error:
        assert "num_tokens must be at least 1, got 0" in str(error), error
    else:
        raise AssertionError("no tokens are taken")


def _dispatcher(case: Case) -> PaddedDispatcher:
    config = DispatchConfig(
        num_experts=case.num_experts,
        top_k=case.top_k,
        capacity_factor=case.factor,  # pyright: ignore
        alignment=case.alignment,
        capacity_pool=case.pool,  # pyright: ignore
        policy=case.policy,  # pyright: ignore
        num_ranks=case.num_ranks,
        etp_size=case.etp_size,
    )
    group, etp_group = _groups(case)
    return PaddedDispatcher(config, group=group, etp_group=etp_group, packed=case.packed)


def _groups(case: Case) -> tuple[Any, Any]:
    """Return this rank's two groups: rank r of the i-th expert-parallel group is i * R + r."""
    if case.etp_size == 1:
        return (dist.group.WORLD if case.num_ranks > 1 else None), None
    if case.num_ranks == 1:
        return None, dist.group.WORLD
    i, r = divmod(dist.get_rank(), case.num_ranks)
    rows = [[j * case.num_ranks + q for q in range(case.num_ranks)] for j in range(case.etp_size)]
    groups = [dist.new_group(row) for row in rows]
    etp_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return groups[i], etp_groups[r]


def _dispatch(case: Case, number: int, dispatcher: PaddedDispatcher) -> tuple[Any, ...]:
    """Dispatch the tokens of a source; return its leaves and the result."""
    source, dtype = case.sources[number], getattr(torch, case.dtype)
    probs_dtype = getattr(torch, case.probs_dtype)

    def leaf(rows: list[list[int]], width: int, divisor: int, dtype: torch.dtype) -> Tensor:
        values = torch.tensor(rows, dtype=torch.float64).view(case.num_tokens, width) / divisor
        return values.to(dtype).requires_grad_()

    tokens_TD = leaf(source.tokens, case.hidden, 1, dtype)
    probs_TE = leaf(source.probs, case.num_experts, 8, probs_dtype)
    map_TE = torch.zeros(case.num_tokens, case.num_experts, dtype=torch.bool)
    for t, experts in enumerate(source.asked):
        map_TE[t, experts] = True
    mask_T = None if source.mask is None else torch.tensor(source.mask, dtype=torch.bool)
    return tokens_TD, probs_TE, dispatcher.dispatch(tokens_TD, probs_TE, map_TE, mask_T)


class _Pass:
    """The pass of one rank, and what it must find."""

    def __init__(self, case: Case, found: list[Answer], number: int) -> None:
        self.case, self.number, self.want = case, number, found[number]
        i, self.rank = divmod(number, case.num_ranks)
        self.rows = fuzz_oracle.expert_rows(case, found, self.rank)
        self.weights, self.found = case.weights[i], found

    def check(self, dispatcher: PaddedDispatcher) -> None:
        case, want = self.case, self.want
        tokens_TD, probs_TE, sent = _dispatch(case, self.number, dispatcher)
        self.check_selection(sent)
        place_of_row = self.check_input(sent)
        given = sent.expert_input
        is_real_N = torch.zeros(len(given.rows_ND), dtype=torch.bool)
        weight_N = torch.zeros(len(given.rows_ND))
        for place, (e, _, _) in zip(place_of_row, self.rows, strict=True):
            is_real_N[place], weight_N[place] = True, self.weights[e]
        rows_ND = _poison(given.rows_ND, is_real_N)
        weighted_N = (_poison(given.probs_N, is_real_N) * weight_N).to(rows_ND.dtype)
        out_ND = _poison(rows_ND * weighted_N[:, None], is_real_N)
        out_ND.retain_grad()
        out_TD = dispatcher.combine(out_ND, sent)
        grad_TD = torch.tensor(case.sources[self.number].grad, dtype=out_TD.dtype)
        out_TD.backward(grad_TD)
        assert out_TD.dtype == tokens_TD.dtype, "dtype of the output"
        self.same("output", out_TD, want.out)
        self.same("gradient of tokens", tokens_TD.grad, want.grad_tokens)
        self.same("gradient of probabilities", probs_TE.grad, want.grad_probs)
        assert out_ND.grad is not None
        if not case.packed:
            padded = out_ND.grad[~is_real_N]
            assert not padded.any(), "gradients of padded rows are zero"
        real = out_ND.grad[place_of_row] if place_of_row else torch.zeros(0, case.hidden)
        expected = [self.case.sources[s].grad[t] for _, s, t in self.rows]
        self.same("gradient of the experts' output", real, expected)

    def check_selection(self, sent: Dispatched) -> None:
        case, want, selection = self.case, self.want, sent.selection
        kept = {(t, e) for t, e in selection.kept_TE.nonzero().tolist()}
        assert kept == want.kept, f"kept {sorted(kept ^ want.kept)} differ"
        assert selection.probs_TE.dtype == getattr(torch, case.probs_dtype)
        self.same("probabilities", selection.probs_TE, want.probs)
        assert selection.demand_E.tolist() == want.demand, "demand"
        assert not sent.plan.unplaced_E.any(), "unplaced"
        assert sent.plan.kept_E.tolist() == fuzz_oracle.counts(case, want.kept), "rows of plan"

    def check_input(self, sent: Dispatched) -> list[int]:
        """Check what the experts read; return the place of each row."""
        case, given = self.case, sent.expert_input
        local = [(e - self.rank * case.num_local, s) for e, s, _ in self.rows]
        own, sources = range(case.num_local), range(len(case.sources))
        table = [[local.count((e, s)) for e in own] for s in sources]
        assert given.kept_SL.tolist() == table, "table of received rows"
        assert given.probs_N.dtype == torch.promote_types(
            getattr(torch, case.probs_dtype), torch.float32
        )
        num_rows = len(given.rows_ND)
        if case.factor != "fit":
            pools = case.num_local if case.pool == "expert" else 1
            expected = pools * len(sources) * fuzz_oracle.slots_of_pools(case)
            assert num_rows == expected, "rows of the experts"
        places = list(range(len(local)))
        if given.offsets_LS is None:
            cell = num_rows // (case.num_local * len(sources))
            nth = [local[:n].count(row) for n, row in enumerate(local)]
            places = [
                (e * len(sources) + s) * cell + n for (e, s), n in zip(local, nth, strict=True)
            ]
            padded = torch.ones(num_rows, dtype=torch.bool)
            padded[places] = False
            assert (given.rows_ND[padded] == 0).all(), "padded rows are zero"
            assert (given.probs_N[padded] == 0).all(), "padded probabilities are zero"
        else:
            ends = [local.count((e, s)) for e in own for s in sources]
            ends = [sum(ends[: n + 1]) for n in range(len(ends))]
            assert given.offsets_LS.flatten().tolist() == ends, "offsets"
        tokens = [case.sources[s].tokens[t] for _, s, t in self.rows]
        probs = [[self.found[s].probs[t][e]] for e, s, t in self.rows]
        self.same("rows", given.rows_ND[places].view(-1, case.hidden), tokens)
        self.same("probabilities of rows", given.probs_N[places].view(-1, 1), probs)
        return places

    def same(self, name: str, found: Tensor | None, expected: Any) -> None:
        """Raise unless all values are equal."""
        assert found is not None, name
        assert found.detach().double().tolist() == expected, name


class _Poison(torch.autograd.Function):
    """Writes NaN where there is no row, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_real: Tensor) -> Tensor:
        ctx.save_for_backward(is_real)
        return torch.where(is_real, values, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return torch.where(ctx.saved_tensors[0], grad, torch.nan), None


def _poison(values: Tensor, is_real_N: Tensor) -> Tensor:
    return _Poison.apply(values, is_real_N.view(-1, *[1] * (values.ndim - 1)))  # pyright: ignore


def fuzz(num_examples: int, number: int, seen: Counter[str]) -> tuple[int, str | None]:
    """Check so many examples; return how many ran, and the first failure with its example.

    Args:
        num_examples: at most so many.
        number: of the block, which is its seed.
        seen: counts what the examples were about.
    """
    ran, last = 0, None

    @seed(number)
    @settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore
    )
    @given(cases())
    def examples(case: Case) -> None:
        nonlocal ran, last
        ran, last = ran + 1, case
        check(case)
        for kind in ("pool", "policy", "dtype", "probs_dtype", "packed"):
            seen[f"{kind} {getattr(case, kind)}"] += 1
        seen[f"R {case.num_ranks}, S {len(case.sources)}"] += 1

    try:
        examples()
    except Exception as error:
        cause = error.__cause__ or error
        return ran, f"{type(cause).__name__}: {cause}; {last}"
    return ran, None


def main() -> None:
    """Fuzz, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000, help="default: 20000")
    parser.add_argument("--first", type=int, default=0, help="number of the first block")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no block later")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, ran, failures, seen = time.monotonic(), 0, [], Counter()
    for number in range(arguments.first, arguments.first + -(-arguments.examples // _BLOCK)):
        if time.monotonic() - start > arguments.seconds:
            break
        done, failure = fuzz(min(_BLOCK, arguments.examples - ran), number, seen)
        ran += done
        if failure is not None:
            failures.append(f"seed {number}: {failure}")
        seconds = time.monotonic() - start
        sys.stdout.write(f"{ran} examples, {len(failures)} failures, {seconds:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.writelines(f"{failure}\n" for failure in failures)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
