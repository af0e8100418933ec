"""Kernels get their phases by name; cases that differ only in contender share their batches."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import padded_dispatch
from padded_dispatch.bench import measure
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.measure import batches, phase_of, phases_ms


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("_place_kernel", "plan"),
        ("_lay_out_kernel", "layout"),
        ("_push_kernel", "exchange"),
        ("_activate_backward_kernel", "activation"),
        ("_permute_kernel", "gather"),
        ("_unpermute_kernel", "combine"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", "exchange"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NTN", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>", "gemm"),
        ("triton_poi_fused_mul_silu_split_0", "activation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward", "router"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>", "router"),
        ("transformer_engine::fused_router::fused_moe_aux_loss_forward_kernel", "router"),
        ("void at::native::reduce_kernel", "other"),
    ],
)
def test_phase_of(kernel, phase):
    assert phase_of(kernel) == phase


def test_phases_are_sums_and_those_without_kernels_are_left_out():
    kernels = {"nvjet_a": 1.5, "_choice_kernel": 0.25, "nvjet_b": 0.5, "sort": 0.125}
    assert phases_ms(kernels) == {"plan": 0.25, "gemm": 2.0, "other": 0.125}


def test_every_kernel_of_ours_has_a_phase():
    """A renamed kernel would fall into `other` without notice."""
    package = Path(padded_dispatch.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    kernels = re.findall(r"@triton\.jit[^\n]*\ndef (\w+_kernel)\(", source)
    assert len(kernels) > 15
    # Of experts with biases, which no case has.
    assert [kernel for kernel in kernels if phase_of(kernel) == "other"] == ["_dot_rows_kernel"]


def test_cases_of_one_layer_and_routing_share_their_batches():
    def drawn(**changes):
        sizes = {"num_tokens": 7, "skew": "hot", "seed": 3} | changes
        return batches(MODELS["tiny"], **sizes, dtype=torch.float32, device=torch.device("cpu"))

    first = drawn()
    assert drawn() is first
    assert drawn(num_tokens=8)[0].tokens.shape == (8, 1, 32)
    again = drawn()
    assert again is not first
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logits, other.logits)


def test_sustained_time_and_energy_are_those_of_the_second_second(monkeypatch):
    """A clock that only `run` moves: 100 ms at first, 125 ms and 50 J from the eleventh run on."""
    runs, rests = [], []

    def seconds() -> float:
        return 0.1 * min(len(runs), 10) + 0.125 * max(len(runs) - 10, 0)

    def energy(handle, answer) -> int:
        answer._obj.value = 50_000 * len(runs)  # mJ
        return 0

    def clock(handle, kind, answer) -> int:
        answer._obj.value = 1980 - len(runs)
        return int(kind != 1)

    library = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=energy, nvmlDeviceGetClockInfo=clock
    )
    monkeypatch.setattr(measure, "_nvml", lambda index: (library, "a handle"))
    monkeypatch.setattr(measure, "_meet", lambda device: None)
    monkeypatch.setattr(measure, "_synchronize", lambda device: None)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=seconds, sleep=rests.append))
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda given, device: tensor(given))
    monkeypatch.setattr(measure.dist, "all_reduce", lambda tensor, op: None)
    gpu = torch.device("cuda", 0)
    found = measure.timed(runs.append, iterations=1, device=gpu)
    assert found.samples_ms == [100] * 5 and found.sm_mhz == [1974, 1973, 1972, 1971, 1970]
    # Twice ten runs: a second at 100 ms each.
    assert len(runs) == 5 + 5 + 20 and runs[-10:] == list(range(10))
    assert (found.sustained_ms, found.joules) == (125, 50)
    assert rests == [0.5] * 5
    monkeypatch.setattr(measure, "_nvml", lambda index: None)
    found = measure.timed(runs.append, iterations=1, device=gpu)
    assert (found.sustained_ms, found.joules, found.sm_mhz) == (125, None, None)
