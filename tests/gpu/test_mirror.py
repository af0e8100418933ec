"""A rank that skips a call, beside NCCL: its peer raises, and both go on in the same group."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange import agreement
from padded_dispatch.exchange.mirror import AbsentRanksError

pytestmark = pytest.mark.multi_gpu


def _one_more_call() -> str:
    """Return the error of rank 0, which makes a call while rank 1 is in a collective of NCCL."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    group = dist.new_group()
    config = DispatchConfig(num_experts=4, top_k=2, num_ranks=2)
    # NCCL's own watchdog has the group's limit; this wait must end long before.
    with patch.object(agreement, "time_limit", lambda group: 2.0):
        dispatcher = PaddedDispatcher(config, group=group)
    tokens_TD, probs_TE = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    words = ""
    for _ in range(3):
        dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)
    if dist.get_rank() == 0:
        with pytest.raises(AbsentRanksError) as caught:
            dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)
        words = str(caught.value)
    summed = torch.ones(5, device=device)
    dist.all_reduce(summed, group=group)
    assert summed.tolist() == [2.0] * 5
    return words


def test_a_rank_that_waits_beside_nccl_raises(gpu_pools):
    words, nothing = gpu_pools[2].run(_one_more_call, timeout_s=120)
    assert nothing == ""
    assert words.startswith(
        "all 2 ranks of the layer must come to call 5 of dispatcher 1 within 2 s, got no call from "
        "rank 1; "
    )
