"""A recommendation as settings to paste: flags of Megatron-LM, YAML, the same in other meanings.

`--padded-...` flags are those of the launcher and of `padded-dispatch train`; keys under
`padded_dispatch` are fields of `PaddedOptions`. The first factor is also right for stock
drop-and-pad, whose capacity has the same definition.
"""

import textwrap

from padded_dispatch.tune.convert import Meaning, Sizes, from_source
from padded_dispatch.tune.study import Study

NO_LAYERS = (
    "No settings for each layer: this trace numbers layers within a pipeline stage, and those of "
    "several stages under one number; options number them in the model."
)

_ELSEWHERE: dict[Meaning, str] = {
    "source": "Megatron-Core, alltoall with padding to capacity: moe_expert_capacity_factor",
    "rank": "Megatron-Core, HybridEP or NCCL EP: moe_expert_rank_capacity_factor",
    "worst-case": "torchtitan, HybridEP: non_blocking_capacity_factor",
    "max-tokens": "DeepEP, low latency: num_max_dispatch_tokens_per_rank",
    "stash": "Megatron-Core: moe_paged_stash_buffer_size_factor_cuda",
}


def options(study: Study, *, per_layer: bool) -> dict[str, str | int]:
    """Fields of `PaddedOptions` that differ from their defaults.

    Args:
        study: with the recommendation.
        per_layer: every layer its own factor, instead of one schedule or factor for all.
    """
    given: dict[str, str | int] = {}
    question, training = study.question, study.training
    if question.policy_given:
        given["policy"] = question.policy
    if question.min_capacity != 1:
        given["min_capacity"] = question.min_capacity
    if question.alignment != 1:
        given["alignment"] = question.alignment
    if per_layer:
        factors = {layer: advice.factor for layer, advice in training.layers.items()}
        given["layer_factors"] = ",".join(f"{n}:{factor:g}" for n, factor in factors.items())
    elif len(training.overall.phases) > 1:
        phases = training.overall.phases
        given["schedule"] = ",".join(f"{p.first_step}:{p.factor:g}" for p in phases)
    # Without it evaluation is as training: with the layer's factor, or with the schedule's last.
    evaluation = study.evaluation.overall.factor
    if given.keys() & {"layer_factors", "schedule"} or evaluation != training.overall.factor:
        given["eval_factor"] = f"{evaluation:g}"
    return given


def flags(study: Study, *, per_layer: bool) -> list[str]:
    """For Megatron-LM through `python -m padded_dispatch.megatron.run`, one flag an item."""
    found = [
        "--moe-token-dispatcher-type padded_alltoall",
        f"--moe-expert-capacity-factor {study.training.overall.factor:g}",
    ]
    for name, value in options(study, per_layer=per_layer).items():
        found.append(f"--padded-{name.replace('_', '-')} {value}")
    return found


def yaml(study: Study, *, per_layer: bool) -> str:
    """Fields of Megatron's TransformerConfig, and of `PaddedOptions` under `padded_dispatch`."""
    lines = [
        *textwrap.wrap(study.training.sentence(), 80, initial_indent="# ", subsequent_indent="# "),
        "moe_token_dispatcher_type: padded_alltoall",
        f"moe_expert_capacity_factor: {study.training.overall.factor:g}",
    ]
    given = options(study, per_layer=per_layer)
    lines += ["padded_dispatch:"] if given else []
    for name, value in given.items():
        lines.append(f'  {name}: "{value}"' if isinstance(value, str) else f"  {name}: {value}")
    return "\n".join([*lines, ""])


def elsewhere(study: Study) -> dict[str, str]:
    """The recommended factor in the field's other meanings: name to value, or why there is none."""
    sizes = Sizes(
        num_tokens=study.num_tokens,
        num_experts=study.num_experts,
        top_k=study.top_k,
        num_ranks=study.num_ranks,
    )
    found = {}
    for meaning, name in _ELSEWHERE.items():
        try:
            value = from_source(study.training.overall.factor, meaning, sizes)
            found[name] = f"{value:.0f}" if meaning == "max-tokens" else f"{value:.4g}"
        except ValueError as error:
            found[name] = str(error)
    return found
