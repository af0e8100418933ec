"""Settings to paste: a block for each place that takes them, which runs as it is printed.

The flags of Megatron-LM, of `padded-dispatch train` and the fields of a config differ, and none of
these places takes those of another. So each gets a block of its own:

Megatron-LM            the launcher takes ours; what it leaves goes to the script. The user's own
                       flags stand in the shell array ARGS
padded-dispatch train  flags of its own beside the launcher's
Python                 `install()`, and fields of `TransformerConfig`
YAML                   the same fields, those of `PaddedOptions` under `padded_dispatch`

A block has the factor, the kind of pool, what the slots were asked to be, and the factors of layers
or steps. It leaves evaluation alone: eager evaluation fits its routing and drops nothing, which a
factor would end. The capacity factor is also right for stock drop-and-pad, whose capacity has the
same definition.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from padded_dispatch.tune.study import Study

NO_LAYERS = (
    "No settings for each layer: this trace numbers layers within a pipeline stage, which merges "
    "those of several stages; options number layers in the model."
)
_COLUMNS = 78


@dataclass(frozen=True, kw_only=True)
class Block:
    """Settings for one `target`; `about`: what it needs, in words; `language`: of `text`."""

    target: str
    about: str
    language: Literal["bash", "python", "yaml"]
    text: str


def blocks(study: Study, *, per_layer: bool) -> tuple[Block, ...]:
    """Return the blocks.

    Args:
        study: with the recommendation.
        per_layer: one factor for each layer, instead of one schedule or factor for all.
    """
    return (
        Block(
            target="Megatron-LM",
            about="with the flags of your model in the shell array ARGS",
            language="bash",
            text=megatron_lm(study, per_layer=per_layer),
        ),
        Block(
            target="padded-dispatch train",
            about="with the flags of your run added",
            language="bash",
            text=train(study, per_layer=per_layer),
        ),
        Block(
            target="Python",
            about="before the config is made, which is TransformerConfig(..., **moe)",
            language="python",
            text=python(study, per_layer=per_layer),
        ),
        Block(
            target="YAML",
            about="fields of TransformerConfig, and of PaddedOptions under padded_dispatch",
            language="yaml",
            text=yaml(study, per_layer=per_layer),
        ),
    )


def markdown(study: Study) -> str:
    """Return all blocks as a Markdown page."""
    lines = ["# Settings", "", *textwrap.wrap(study.training.sentence(), 100)]
    lines += _fenced(blocks(study, per_layer=False))
    if len(study.training.layers) > 1:
        lines += ["", "# With a factor for each layer"]
        if study.layers_of_model:
            lines += _fenced(blocks(study, per_layer=True))
        else:
            lines += ["", *textwrap.wrap(NO_LAYERS, 100)]
    return "\n".join([*lines, ""])


def options(study: Study, *, per_layer: bool) -> dict[str, Any]:
    """Return the fields of `PaddedOptions` that differ from their defaults; see `blocks`."""
    given: dict[str, Any] = {}
    question, training = study.question, study.training
    if study.pool != "expert":
        given["capacity_pool"] = study.pool
    if question.min_capacity != 1:
        given["min_capacity"] = question.min_capacity
    if question.alignment != 1:
        given["alignment"] = question.alignment
    if per_layer:
        given["layer_factors"] = {n: advice.factor for n, advice in training.layers.items()}
    elif len(training.overall.phases) > 1:
        phases = training.overall.phases
        given["schedule"] = tuple((phase.first_step, phase.factor) for phase in phases)
    return given


def megatron_lm(study: Study, *, per_layer: bool) -> str:
    """Return a command that starts Megatron-LM's pretrain_gpt.py on all GPUs of a host."""
    return _command(
        "torchrun",
        "--nproc-per-node auto",
        "-m padded_dispatch.megatron.run",
        "pretrain_gpt.py",
        '"${ARGS[@]}"',
        "--moe-token-dispatcher-type padded_alltoall",
        f"--moe-expert-capacity-factor {_factor(study)}",
        *_padded_flags(study, per_layer=per_layer),
    )


def train(study: Study, *, per_layer: bool) -> str:
    """Return a command of `padded-dispatch train`; layers of their own fix their number."""
    layers = [f"--num-layers {max(study.training.layers)}"] if per_layer else []
    return _command(
        "padded-dispatch train",
        *layers,
        f"--capacity-factor {_factor(study)}",
        *_padded_flags(study, per_layer=per_layer),
    )


def python(study: Study, *, per_layer: bool) -> str:
    """Return statements that install the options and name the fields of the config."""
    given = options(study, per_layer=per_layer)
    lines = [f"    {name}={_python_text(value)}," for name, value in given.items()]
    names = "PaddedOptions, install" if given else "install"
    installed = ["install(PaddedOptions(", *lines, "))"] if given else ["install()"]
    return "\n".join(
        [
            f"from padded_dispatch.megatron import {names}",
            "",
            *installed,
            "moe = dict(",
            '    moe_token_dispatcher_type="padded_alltoall",',
            f"    moe_expert_capacity_factor={_factor(study)},",
            ")",
        ]
    )


def yaml(study: Study, *, per_layer: bool) -> str:
    """Return fields of TransformerConfig, and of `PaddedOptions` under `padded_dispatch`."""
    given = options(study, per_layer=per_layer)
    return "\n".join(
        [
            "moe_token_dispatcher_type: padded_alltoall",
            f"moe_expert_capacity_factor: {_factor(study)}",
            *(["padded_dispatch:"] if given else []),
            *(f"  {name}: {_yaml_text(value)}" for name, value in given.items()),
        ]
    )


def _factor(study: Study) -> str:
    return f"{study.training.overall.factor:g}"


def _padded_flags(study: Study, *, per_layer: bool) -> list[str]:
    """Return flags of the launcher, which `padded-dispatch train` takes, too."""
    return [
        f"--padded-{name.replace('_', '-')} {_flag_text(value)}"
        for name, value in options(study, per_layer=per_layer).items()
    ]


def _command(*parts: str) -> str:
    """Return a command line, broken between its parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < _COLUMNS - len(" \\"):
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return " \\\n".join(lines)


def _fenced(found: Sequence[Block]) -> list[str]:
    lines = []
    for block in found:
        about = f"{block.target}, {block.about}:"
        lines += ["", *textwrap.wrap(about, 100), "", f"```{block.language}", block.text, "```"]
    return lines


def _flag_text(value: Any) -> str:
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple):
        return ",".join(f"{number}:{factor:g}" for number, factor in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yaml_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{number}: {factor:g}" for number, factor in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(f"[{number}, {factor:g}]" for number, factor in value) + "]"
    return _flag_text(value)


def _python_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(f"({number}, {factor:g})" for number, factor in value) + ")"
    return f'"{value}"' if isinstance(value, str) else _yaml_text(value)
