"""From kernels to phases: a graph has no Python to ask, but its kernels have names.

A kernel's name says what it does, not for whom. `gather` is therefore rows into slots: the forward
of dispatch and the backward of combine; `combine` is the sum back: the forward of combine and the
backward of dispatch. `exchange` includes what a collective or a barrier waits for its
peers. `copies` are where the padded layout is regrouped, and where a graph's inputs are filled.
Whatever matches nothing is `other`: the router, losses, fused element-wise code.
"""

import re

# The first that matches decides.
_PHASES = {
    "select": r"_select_kernel|_choice_ranks_kernel",
    "plan": r"_rank_kernel|_slot_kernel|_row_id_map",
    "side": r"_(gather|scatter)_side_kernel",
    "gather": r"_spread_rows_kernel|\b_permute_kernel|_unpermute_bwd",
    "combine": r"_sum_rows_kernel|_unpermute_kernel",
    "regroup": r"_regroup|_pack_rows|_unpack_rows|sort_chunks",
    "exchange": r"nccl|_push_rows|_send_home|_tell_counts|_place_rows|barrier_kernel",
    "gemm": r"nvjet|cutlass|gemm|sm90_xmma|cublas",
    "activation": r"silu|swiglu|gated|gelu|sigmoid|_activation_kernel",
    "copies": r"Memcpy|Memset|copy_kernel|FillFunctor|CatArray",
}
_MATCHES = {phase: re.compile(pattern, re.IGNORECASE) for phase, pattern in _PHASES.items()}


def phase_of(kernel: str) -> str:
    """The phase that a kernel of this name belongs to."""
    return next((phase for phase, m in _MATCHES.items() if m.search(kernel)), "other")


def phases_ms(kernels_ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds by phase, from milliseconds by kernel, in the order of the work."""
    sums = dict.fromkeys((*_MATCHES, "other"), 0.0)
    for kernel, ms in kernels_ms.items():
        sums[phase_of(kernel)] += ms
    return {phase: round(ms, 4) for phase, ms in sums.items() if ms}
