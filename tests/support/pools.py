"""Sizes of pools by hand, for tests that need no config."""

from padded_dispatch.config import PoolSizes


def pools(num_experts: int, slots: int, experts_per_pool: int = 1) -> PoolSizes:
    """Return the sizes of pools of `slots` slots each on one rank, as if rows may be dropped."""
    num_pools = num_experts // experts_per_pool
    return PoolSizes(
        num_experts=num_experts,
        num_pools=num_pools,
        pool_slots=slots,
        num_rows=num_pools * slots,
        may_drop=True,
    )
