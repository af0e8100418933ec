"""A plan's parts beside formulas, its command, and the table of the architecture page.

    python -m tests.tune.test_plan

writes that table.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from padded_dispatch import cli
from padded_dispatch.exchange import mirror
from padded_dispatch.tune import command
from padded_dispatch.tune.plan import MemoryPlan, requests_at_start
from padded_dispatch.utils.shapes import MOE_LAYERS, SHAPES

PAGE = Path(__file__).parents[2] / "padded_dispatch" / "README.md"
BEGIN, END = "<!-- plans: written by `python -m tests.tune.test_plan` -->", "<!-- plans: end -->"
MODELS = {
    "qwen3-30b-a3b": "Qwen3-30B",
    "gpt-oss-120b": "GPT-OSS-120B",
    "deepseek-v3": "DeepSeek-V3",
}
PLACES = [(8, 1), (32, 1), (64, 1), (16, 2), (32, 4), (64, 8)]  # EP, hosts


def plan_of(model: str, **given: Any) -> MemoryPlan:
    given = {"store_layers": MOE_LAYERS[model]} | given
    return MemoryPlan(shape=SHAPES[model], **given)


def gib_of(plan: MemoryPlan) -> dict[str, float]:
    return {part.name: part.num_bytes / 2**30 for part in plan.parts}


def table() -> str:
    names = "landing", "home", "store", "tokens kept", "plans kept", "temporaries", "all"
    lines = [f"| | {' | '.join(names)} | MiB of plans |", f"|---|{'---|' * (len(names) + 1)}"]
    for model, name in MODELS.items():
        for ep, hosts in PLACES:
            plan = plan_of(model, ep=ep, hosts=hosts)
            gib, layer = gib_of(plan), plan.layer
            landing = sum(gib.pop(part) for part in list(gib)[:3])
            numbers = [f"{number:.2f}" for number in (landing, *gib.values())]
            numbers += [f"{plan.num_bytes / 2**30:.1f}", f"{layer.plans_on_the_wire / 2**20:.1f}"]
            where = f"{name}, EP {ep}" + (f", {hosts} hosts" if hosts > 1 else "")
            lines.append(f"| {where} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the page with the table as it is now."""
    begin, rest = text.split(BEGIN)
    return f"{begin}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def test_the_table_of_the_page_is_that_of_the_functions():
    text = PAGE.read_text()
    assert with_table(text) == text, "run python -m tests.tune.test_plan"


def test_parts_are_the_formulas_of_the_page():
    """By hand, for Qwen3 on one host, on four, and over collectives."""
    tokens, token, choices = 4096, 2048 * 2, 4096 * 8
    store = 48 * 40960 * (1536 * 2 + 12)
    one = plan_of("qwen3-30b-a3b", ep=8, microbatches=2)
    assert {part.name: part.num_bytes for part in one.parts} == {
        "landing buffer": 7 * tokens * token,
        "second landing buffer": 0,
        "plans that arrive": 12 * 8 * choices + 4 * 8 * 16,
        "rows that come home": choices * (token + 4),
        "store": 2 * store,
        "tokens kept": 2 * 48 * 7 * tokens * token,
        # Rows of six layers end before the store's, and none comes behind the last.
        "plans kept": 2 * (48 * (8 * tokens * (8 + 1) * 4 + choices * 4) + 41 * 8 * choices * 4),
        "temporaries of a layer": 8 * choices * ((2048 + 2 * 768) * 2 + 4),
    }
    assert one.num_bytes == sum(part.num_bytes for part in one.parts)
    hosts = {part.name: part.num_bytes for part in plan_of("qwen3-30b-a3b", ep=32, hosts=4).parts}
    assert hosts["landing buffer"] == hosts["second landing buffer"] == 7 * 4 * tokens * token
    assert hosts["rows that come home"] == 4 * choices * (token + 4)
    assert hosts["tokens kept"] == 48 * 4 * tokens * token
    far = plan_of("qwen3-30b-a3b", ep=32, exchange="alltoall")
    assert [part.name for part in far.parts][:2] == ["store", "tokens kept"]
    assert far.parts[1].num_bytes == 0 and not far.layer.direct


def test_the_way_that_a_plan_assumes():
    """Cells, and one rank on each host, cross without a rail; then nothing is direct."""

    def way(**given: Any) -> tuple[bool, int]:
        layer = plan_of("qwen3-30b-a3b", ep=16, **given).layer
        return layer.direct, layer.num_hosts

    assert way() == (True, 1) == way(exchange="direct")
    assert way(exchange="alltoall") == (False, 1)
    assert way(hosts=2) == (True, 2)
    assert way(hosts=2, exchange="alltoall") == (False, 2)
    assert way(hosts=16) == (False, 1)
    assert way(hosts=2, pool="cells") == (False, 1)
    assert way(pool="cells") == (True, 1)


@pytest.fixture
def tune(capsys):
    """Run the command; return its words."""

    def run(flags: str) -> str:
        assert cli.main(["tune", *flags.split()]) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


def test_the_command(tune):
    words = tune("--plan deepseek-v3 --ep 64 --store-layers 15")
    plan = plan_of("deepseek-v3", ep=64, store_layers=15)
    assert words == " ".join(str(plan).split())
    assert max(map(len, str(plan).splitlines())) <= 80
    assert "bf16. D 7,168, E 256, K 8, F 2,048; EP 64, direct writes; T 4,096, factor" in words
    assert "Y 15, I 1; S 64, P 4,096, N 614,400, M 614,400." in words
    assert "Soft: rows past M, which backward computes again, and tokens of other ranks," in words
    assert "Dropped: rows of one layer past 614,400." in words
    assert "store 132 times. Before an eager call 3,072 bytes come to each, to compare." in words
    words = tune("--plan=2048,128,8,768,768 --ep 16 --hosts 2 --microbatches 3")
    assert "rails between 2 hosts, direct writes inside" in words
    assert "Y 1, I 3; S 8, P 8,192, N 163,840, M 163,840." in words
    row = 163_840 * (768 * 2 + 12) * 3 / 2**30
    assert f"{row:.2f} store: I M (G + 6)" in words
    cells = "--pool cells --capacity-factor 1"
    words = tune(f"--plan gpt-oss-120b --ep 32 --hosts 4 {cells}")
    assert "collectives across 4 hosts" in words
    assert "Dropped: rows of a rank for an expert past 128." in words
    nothing = tune("--plan 2048,128,8,768 --ep 8 --capacity-factor none")
    assert "factor none" in nothing and "Dropped: nothing." in nothing
    words = tune("--plan qwen3-30b-a3b --ep 1")
    assert "EP 1, no exchange" in words and words.endswith("Dropped: nothing.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ep 8 --plan qwen4", "--plan must be one of qwen3-30b-a3b, .* D,E,K,F, got 'qwen4'"),
        ("--ep 8 --plan 2048,128,8", "--plan must be one of "),
        ("--ep 8 --plan 2048,128,8,0", "--plan must be one of "),
        ("--ep 12 --plan gpt-oss-120b --hosts 5", "--hosts must divide ep=12"),
        ("--ep 8 --plan gpt-oss-120b --hosts 0", "--hosts must be at least 1, got 0"),
        ("--ep 8 --plan gpt-oss-120b --tokens 0", "--tokens must be at least 1, got 0"),
        ("--ep 8 --plan gpt-oss-120b --store-layers 0", "--store-layers must be at least 1"),
        ("--ep 8 --plan gpt-oss-120b --microbatches -1", "--microbatches must be at least 1"),
        ("--ep 8 --hosts 8 --plan gpt-oss-120b --exchange direct", "--exchange must be alltoall"),
        ("--ep 7 --plan gpt-oss-120b", "--ep must divide the model's 128 experts, got 7"),
        (
            "--ep 8 --plan gpt-oss-120b --capacity-factor 0",
            "--capacity-factor must be a number above 0, or 'none' to drop nothing, got 0.0",
        ),
    ],
)
def test_mistakes(flags: str, message: str):
    with pytest.raises(ValueError, match=message):
        command.main(command.read(flags.split()))


class _Store(dist.Store):
    """The job's store as one rank uses it; `requests` counts."""

    def __init__(self, job: dist.Store) -> None:
        super().__init__()
        self.job, self.requests = job, 0

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        pass


def _asking(name: str) -> Any:
    def ask(self: _Store, *given: Any) -> Any:
        self.requests += 1
        return getattr(self.job, name)(*given)

    return ask


for _name in ("set", "get", "wait", "check", "multi_get", "multi_set", "add", "compare_set"):
    setattr(_Store, _name, _asking(_name))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_requests_at_start(num_ranks: int):
    """Of real connections, between threads."""
    job, me, found = dist.HashStore(), threading.local(), []

    def start(rank: int) -> None:
        me.rank, me.store = rank, _Store(job)
        group: Any = SimpleNamespace(group_name="ranks")
        found.append((mirror.Mirror([group], 60), me.store.requests))

    with (
        patch.object(mirror.dist, "get_rank", lambda: me.rank),
        patch.object(mirror.dist, "get_process_group_ranks", lambda group: [*range(num_ranks)]),
        patch.object(mirror, "job_store", lambda: me.store),
    ):
        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(num_ranks)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert [requests for _, requests in found] == [requests_at_start(num_ranks)] * num_ranks


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
