"""Kernels find their phases by name."""

import pytest

from padded_dispatch.bench.measure import phase_of, phases_ms


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("_select_kernel", "select"),
        ("_choice_ranks_kernel", "select"),
        ("_slot_kernel", "plan"),
        ("_gather_meta_kernel", "side"),
        ("_spread_rows_kernel", "gather"),
        ("_permute_kernel", "gather"),
        ("_sum_rows_kernel", "combine"),
        ("_unpermute_kernel", "combine"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("_push_rows_kernel", "exchange"),
        (
            "c10d::symmetric_memory::barrier_kernel(unsigned int**, int)",
            "exchange",
        ),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NTN", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>", "gemm"),
        ("triton_poi_fused_mul_silu_split_0", "activation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::softmax_warp_forward", "other"),
    ],
)
def test_phase_of(kernel, phase):
    assert phase_of(kernel) == phase


def test_phases_are_sums_and_those_without_kernels_are_left_out():
    kernels = {"nvjet_a": 1.5, "_slot_kernel": 0.25, "nvjet_b": 0.5, "sort": 0.125}
    assert phases_ms(kernels) == {"plan": 0.25, "gemm": 2.0, "other": 0.125}
