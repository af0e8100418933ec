"""Settings to paste: a block for each place that takes them, which runs as it is printed.

Megatron-LM   `padded_dispatch.megatron.run` reads our flags and passes the others to the script;
              the user's own flags are in the shell array ARGS
Python        `install()`, and fields of `TransformerConfig`

A block sets no factor of evaluation, since eager evaluation drops nothing without one. A factor for
cells is also right for stock drop-and-pad, whose capacity has the same definition.
"""

from typing import Any

from padded_dispatch.tune.recommend import Study
from padded_dispatch.utils.flags import flag


def blocks(study: Study, *, per_layer: bool = False) -> dict[str, str]:
    """Return blocks by title, for Megatron-LM's pretrain_gpt.py on all GPUs of a host, and Python.

    Args:
        study: its recommendation is used.
        per_layer: write one factor for each layer, unless layers share a store.
    """
    factor, fields = f"{study.chosen.overall.factor:g}", options(study, per_layer=per_layer)
    command = [
        "torchrun --nproc-per-node auto -m padded_dispatch.megatron.run",
        'pretrain_gpt.py "${ARGS[@]}"',
        "--moe-token-dispatcher-type padded_alltoall",
        f"--moe-expert-capacity-factor {factor}",
        *(f"{flag(f'padded_{name}')} {_text(value)}" for name, value in fields.items()),
    ]
    lines = [
        "from padded_dispatch.megatron import PaddedOptions, install",
        "",
        "install(PaddedOptions(",
        *(f"    {name}={value!r}," for name, value in fields.items()),
        "))",
        "moe = dict(",
        '    moe_token_dispatcher_type="padded_alltoall",',
        f"    moe_expert_capacity_factor={factor},",
        ")",
    ]
    shell = "Megatron-LM, with the flags of your model in the shell array ARGS"
    python = "Python, before the config is made, which is TransformerConfig(..., **moe)"
    return {shell: " \\\n  ".join(command), python: "\n".join(lines)}


def options(study: Study, *, per_layer: bool) -> dict[str, Any]:
    """Return the fields of `PaddedOptions`; see `blocks`."""
    fields: dict[str, Any] = {"capacity_pool": study.pool}
    if per_layer and study.pool == "expert":
        layers = study.chosen.layers.items()
        fields["layer_factors"] = {layer: advice.factor for layer, advice in layers}
    return fields


def _text(value: str | dict[int, float]) -> str:
    if isinstance(value, str):
        return value
    return ",".join(f"{number}:{factor:g}" for number, factor in value.items())
