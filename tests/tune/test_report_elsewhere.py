"""The same capacity in other dispatchers' meanings."""

import dataclasses

from padded_dispatch.tune.report import elsewhere
from padded_dispatch.tune.study import Question, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.target import Target

SIZES = TraceSizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=8, top_k=2)
QUESTION = Question(target=Target(drop=0.05, steps_share=0.9), eval_target=Target(drop=0.0))
FOUND = study(synthetic_trace("lognormal", SIZES, seed=1), QUESTION, name="lognormal")


def test_the_same_elsewhere():
    factor = FOUND.training.overall.factor
    source, rank, worst, tokens, stash = elsewhere(FOUND).values()
    assert source == rank == stash == f"{factor:.4g}"
    assert worst == f"{min(1.0, factor / 2):.4g}"  # two ranks, four experts each, top-2
    assert "at least 4 for max-tokens" in tokens


def test_tokens_are_a_whole_number():
    overall = dataclasses.replace(FOUND.training.overall, factor=4.0)  # E / K: drops nothing
    training = dataclasses.replace(FOUND.training, overall=overall)
    many = dataclasses.replace(FOUND, num_tokens=16384, training=training)
    assert elsewhere(many)["DeepEP, low latency: num_max_dispatch_tokens_per_rank"] == "16384"
