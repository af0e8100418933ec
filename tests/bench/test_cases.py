"""The cases of a sweep, and their cells."""

from argparse import Namespace

from padded_dispatch.bench.cases import Case, sweep

CASE = {"model": "tiny", "ep": 2, "tokens": 64, "skew": "uniform", "contender": "module"}


def test_a_sweep_is_every_combination_and_those_that_do_not_drop_once():
    sizes = {"tokens": [64], "skews": ["uniform"], "capacity_factors": [1.0, 2.0]}
    models, contenders = ["tiny", "qwen3-30b-a3b"], ["dropless", "module", "packed"]
    given = {"models": models, "ep": [2, 1], "contenders": contenders, "main_grad": ["none"]}
    cases = sweep(Namespace(**given, **sizes))
    found = [(c.ep, c.model, c.contender, c.capacity_factor) for c in cases]
    assert found == [
        (ep, model, contender, factor)
        for ep in (2, 1)
        for model in models
        for contender, factor in [
            ("dropless", None),
            *((name, factor) for factor in (1.0, 2.0) for name in contenders[1:]),
        ]
    ]


def test_capacity_is_the_dispatchers():
    case = Case(**CASE, capacity_factor=1.25)
    assert case.dispatch_config().capacity(64) == 20  # 64 * 2 / 8 * 1.25
    assert Case(**CASE, capacity_factor=None).dispatch_config().capacity(64) == 64
