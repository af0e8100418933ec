"""Experts of all kinds train in Megatron-FSDP as stock ones do, on two ranks over gloo."""

from collections.abc import Iterator

import pytest

from tests.support.parity import megatron
from tests.support.pool import WorkerPool, end_idle_workers
from tests.support.sharded_training import fsdp_on_cpu, losses


@pytest.fixture(scope="module", autouse=True)
def workers_end(pool2: WorkerPool) -> Iterator[None]:
    """Take new workers, and end them: caches of DTensor keep meshes, and those hold groups.

    A worker that other tests had used has died in a collective of Megatron-FSDP.
    """
    end_idle_workers()
    yield
    pool2.end()


def _train(strategy: str, ep: int) -> dict[str, list[float]]:
    with megatron("cpu", expert_model_parallel_size=ep), fsdp_on_cpu():
        how = {"ep": ep, "steps": 4}
        found = {"stock": losses("allgather", strategy, **how)}
        for experts in ("module", "packed"):
            found[experts] = losses("padded_alltoall", strategy, experts=experts, **how)
        return found


@pytest.mark.parametrize(
    ("strategy", "ep"), [("optim_grads_params", 1), ("optim_grads_params", 2), ("optim_grads", 2)]
)
def test_losses_are_those_of_stock(pool2, strategy, ep):
    for found in pool2.run(_train, strategy, ep):
        stock = found.pop("stock")
        assert stock[-1] < stock[0] - 0.1  # It learned its first tokens.
        for experts, ours in found.items():
            assert ours == pytest.approx(stock, rel=1e-6), experts
