"""Passes that are recomputed, asked for in part, or given too many experts, on one GPU."""

import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.support.passes import E, K, Layer, flipped_differs, partial_differs, selective_differs
from tests.support.whole_layers import SAVES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("saves", SAVES)
def test_selective_recompute_has_the_same_bits(cuda, saves):
    assert selective_differs(cuda, saves) == []


def test_a_recomputed_pass_has_the_gradients_of_its_own_routing(cuda):
    assert flipped_differs(cuda) == []


def test_a_partial_backward_changes_no_sums(cuda):
    assert partial_differs(cuda) == []


def replay_with_too_many() -> None:
    """Capture a pass, and replay it with a token of K + 1 experts: the program ends."""
    torch.cuda.set_stream(torch.cuda.Stream())
    layer = Layer(torch.device("cuda"))
    run = partial(layer.run, *layer.inputs)
    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        sys.stdout.write("replayed")
        layer.map_TE[5] = torch.arange(E, device="cuda") <= K
        graph.replay()
        torch.cuda.synchronize()
    sys.stdout.write("not noticed")


def test_a_token_with_more_than_k_experts_ends_a_replay(cuda):
    """In a process of its own: a failed assertion ends the device for a process."""
    program = "from tests.gpu.test_passes import *; replay_with_too_many()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode != 0 and ran.stdout == "replayed"
    assert "a token has more experts than top_k (moe_router_topk): raise it" in ran.stderr
