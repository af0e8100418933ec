"""Report a study as text for a terminal: the answer, tables, and settings to paste.

The settings leave evaluation alone: eager evaluation fits its routing and drops nothing, which a
factor would end. The factor of cells is also right for stock drop-and-pad, whose capacity has the
same definition.
"""

import math
import textwrap

import numpy as np

from padded_dispatch.tune.cost import LayerSizes, balanced_drop, kept_bytes
from padded_dispatch.tune.recommend import Recommendation, Study, percent, quantile

# A row of the table of factors is the smallest that drops no more than this.
_SHARES = (0.3, 0.1, 0.05, 0.01, 0.001, 0.0)
_COLUMNS = 80


def summary(study: Study, sizes: LayerSizes | None = None) -> str:
    """Return the text, its prose at most 80 columns wide.

    Args:
        study: its content.
        sizes: of the layers, for the column of bytes.
    """
    chosen = study.chosen
    prose = [chosen.sentence(), *chosen.warnings()]
    filled = [
        textwrap.fill(text, _COLUMNS, break_on_hyphens=False, break_long_words=False)
        for text in prose
    ]
    parts = ["\n".join(filled)]
    if len(study.answers) > 1:
        parts.append(pool_table(study))
    parts.append(factor_table(chosen, sizes))
    if len(chosen.layers) > 1:
        parts.append(layer_table(chosen))
    parts += [f"Megatron-LM, with the flags of your model in the shell array ARGS:\n{bash(chosen)}"]
    parts += [f"Python, before TransformerConfig(..., **moe):\n{python(chosen)}"]
    if len(chosen.layers) > 1 and chosen.replay.pool == "expert":
        factors = ",".join(f"{layer}:{one.factor:g}" for layer, one in chosen.layers.items())
        parts.append(f"For a factor of each layer, add\n--padded-layer-factors {factors}")
    return "\n\n".join(parts)


def _table(columns: dict[str, list[str]], marked: int | None = None) -> str:
    """Return the columns as text, with a mark at the recommended row."""
    lines = [(" ", *columns)]
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        lines.append((">" if number == marked else " ", *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([c.rjust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"{mark} {'  '.join(cells)}" for mark, *cells in rows)


def pool_table(study: Study) -> str:
    """Return a row for each kind of pool; equal factors are equal bytes."""
    answers = study.answers
    needed = [math.ceil(float(answer.replay.needed.max()) * 100) / 100 for answer in answers]
    columns = {
        "pool": [answer.replay.pool for answer in answers],
        "factor": [f"{answer.overall.factor:g}" for answer in answers],
        "dropped": [percent(answer.overall.dropped) for answer in answers],
        "steps with drops": [percent(answer.retried) for answer in answers],
        "drops nothing at": [f"{factor:g}" for factor in needed],
    }
    return _table(columns, answers.index(study.chosen))


def factor_table(answer: Recommendation, sizes: LayerSizes | None = None) -> str:
    """Return the drop and, for `sizes`, the cost of some factors.

    `balanced` is what a perfectly balanced router drops of cells, since tokens choose at random.
    """
    replay, num_tokens = answer.replay, answer.replay.demand.num_tokens
    shown = {int(np.argmax(replay.factors == answer.overall.factor))}
    shown |= {int(np.argmax(replay.dropped_share <= share)) for share in _SHARES}
    rows, asked = sorted(shown), replay.asked.sum(0)
    by_step = replay.dropped.sum(1)[:, asked > 0] / asked[asked > 0]
    in_most = quantile(by_step, answer.target.steps_share)
    columns = {
        "factor": [f"{replay.factors[i]:g}" for i in rows],
        "rows" if replay.pool == "store" else "slots": [f"{replay.room[i]:,}" for i in rows],
        "dropped": [percent(replay.dropped_share[i]) for i in rows],
        f"{percent(answer.target.steps_share)} of steps": [
            f"<= {percent(in_most[i])}" for i in rows
        ],
    }
    if replay.pool == "expert":
        of_cell = {"top_k": replay.demand.top_k, "num_experts": replay.demand.num_experts}
        columns["balanced"] = [
            percent(balanced_drop(num_tokens=num_tokens, capacity=int(replay.room[i]), **of_cell))
            for i in rows
        ]
    if sizes is not None:
        kept = [kept_bytes(replay.configs[i], num_tokens, sizes) for i in rows]
        columns["GiB"] = [f"{size / 2**30:.3g}" for size in kept]
    chosen = rows.index(int(np.argmax(replay.factors == answer.overall.factor)))
    return _table(columns, chosen)


def layer_table(answer: Recommendation) -> str:
    """Return what the factor does to each layer of a store; of cells, each layer's own factor."""
    replay, layers = answer.replay, answer.layers
    alone = dict(zip(replay.demand.layers.tolist(), replay.needed_alone.tolist(), strict=True))
    columns = {
        "layer": [str(layer) for layer in layers],
        "drops nothing alone at": [f"{alone[layer]:.3g}" for layer in layers],
        "dropped": [percent(advice.dropped) for advice in layers.values()],
        "worst step": [percent(advice.worst) for advice in layers.values()],
    }
    if replay.pool == "expert":
        columns["factor"] = [f"{advice.factor:g}" for advice in layers.values()]
        columns["slots"] = [f"{advice.room:,}" for advice in layers.values()]
    return _table(columns)


def bash(answer: Recommendation) -> str:
    """Return a command that starts Megatron-LM's pretrain_gpt.py on all GPUs of a host.

    The launcher takes our flags and leaves the others to the script.
    """
    return " \\\n  ".join(
        [
            "torchrun --nproc-per-node auto -m padded_dispatch.megatron.run",
            'pretrain_gpt.py "${ARGS[@]}"',
            "--moe-token-dispatcher-type padded_alltoall",
            f"--moe-expert-capacity-factor {answer.overall.factor:g}",
            f"--padded-capacity-pool {answer.replay.pool}",
        ]
    )


def python(answer: Recommendation) -> str:
    """Return statements that install the options and name the fields of the config."""
    return (
        "from padded_dispatch.megatron import PaddedOptions, install\n\n"
        f'install(PaddedOptions(capacity_pool="{answer.replay.pool}"))\n'
        "moe = dict(\n"
        '    moe_token_dispatcher_type="padded_alltoall",\n'
        f"    moe_expert_capacity_factor={answer.overall.factor:g},\n"
        ")"
    )
