"""Settings to paste: their content, and that the options accept them."""

import argparse
import dataclasses

import pytest

from padded_dispatch.megatron.options import PaddedOptions, add_arguments, from_arguments
from padded_dispatch.tune.recommend import Phase, Target
from padded_dispatch.tune.report import elsewhere, flags, options, yaml
from padded_dispatch.tune.study import Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace


@pytest.fixture(scope="module")
def found():
    sizes = TraceSizes(
        num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=8, top_k=2
    )
    trace = synthetic_trace("lognormal", sizes, seed=1)
    trace = dataclasses.replace(trace, layers=trace.layers - trace.layers.min() + 1)
    question = Question(
        target=Target(drop=0.05, steps_share=0.9),
        eval_target=Target(drop=0.0, steps_share=0.9),
        alignment=16,
        min_capacity=4,
    )
    return study(trace, question, name="lognormal")


def with_phases(found, *phases):
    overall = dataclasses.replace(found.training.overall, phases=phases)
    return dataclasses.replace(found, training=dataclasses.replace(found.training, overall=overall))


def test_flags_are_those_of_the_launcher(found):
    factor = found.training.overall.factor
    evaluation = found.evaluation.overall.factor
    assert flags(found, per_layer=False) == [
        "--moe-token-dispatcher-type padded_alltoall",
        f"--moe-expert-capacity-factor {factor:g}",
        "--padded-min-capacity 4",
        "--padded-alignment 16",
        f"--padded-eval-factor {evaluation:g}",
    ]
    assert evaluation > factor


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_options_accept_them(found, per_layer):
    found = with_phases(found, Phase(first_step=0, factor=2.0), Phase(first_step=40, factor=1.25))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = " ".join(flags(found, per_layer=per_layer)[2:]).split()
    read = from_arguments(parser.parse_args(words))
    assert read == PaddedOptions(**options(found, per_layer=per_layer))
    factors = {layer: advice.factor for layer, advice in found.training.layers.items()}
    assert read.layer_factors == (factors if per_layer else {})
    assert read.factor_of_step == ({} if per_layer else {0: 2.0, 40: 1.25})
    assert read.eval_factor == found.evaluation.overall.factor


@pytest.mark.parametrize("per_layer", [False, True])
def test_evaluation_is_named_wherever_training_has_several_factors(found, per_layer):
    """Without it, evaluation would take the layer's own factor, or the schedule's last one."""
    found = with_phases(found, Phase(first_step=0, factor=2.0), Phase(first_step=40, factor=1.25))
    found = dataclasses.replace(found, evaluation=found.training)
    given = PaddedOptions(**options(found, per_layer=per_layer))
    assert given.eval_factor == found.training.overall.factor


def test_a_policy_is_named_where_it_was_asked_for(found):
    question = dataclasses.replace(found.question, policy="priority", policy_given=True)
    asked = dataclasses.replace(found, question=question)
    assert "--padded-policy priority" in flags(asked, per_layer=False)
    assert PaddedOptions(**options(asked, per_layer=False)).policy == "priority"
    assert "policy" not in options(found, per_layer=False)


def test_yaml(found):
    found = with_phases(found, Phase(first_step=0, factor=2.0), Phase(first_step=40, factor=1.25))
    factor, evaluation = found.training.overall.factor, found.evaluation.overall.factor
    lines = yaml(found, per_layer=False).splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert " ".join(line[2:] for line in comments) == found.training.sentence()
    assert all(len(line) <= 80 for line in comments)
    assert lines[len(comments) :] == [
        "moe_token_dispatcher_type: padded_alltoall",
        f"moe_expert_capacity_factor: {factor:g}",
        "padded_dispatch:",
        "  min_capacity: 4",
        "  alignment: 16",
        "  schedule: [[0, 2], [40, 1.25]]",
        f"  eval_factor: {evaluation:g}",
    ]


def test_nothing_beyond_the_factor_where_nothing_is_needed():
    sizes = TraceSizes(
        num_steps=8, num_layers=1, num_ranks=2, num_tokens=64, num_experts=8, top_k=2
    )
    question = Question(target=Target(), eval_target=Target())
    even = study(synthetic_trace("balanced", sizes), question, name="balanced")
    assert yaml(even, per_layer=False).splitlines()[-2:] == [
        "moe_token_dispatcher_type: padded_alltoall",
        "moe_expert_capacity_factor: 1",
    ]


def test_the_same_elsewhere(found):
    factor = found.training.overall.factor
    source, rank, worst, tokens, stash = elsewhere(found).values()
    assert source == rank == stash == f"{factor:.4g}"
    assert worst == f"{min(1.0, factor / 2):.4g}"  # two ranks, four experts each, top-2
    assert "at least 4 for max-tokens" in tokens


def test_tokens_are_a_whole_number(found):
    overall = dataclasses.replace(found.training.overall, factor=4.0)  # E / K: drops nothing
    training = dataclasses.replace(found.training, overall=overall)
    many = dataclasses.replace(found, num_tokens=16384, training=training)
    assert elsewhere(many)["DeepEP, low latency: num_max_dispatch_tokens_per_rank"] == "16384"
