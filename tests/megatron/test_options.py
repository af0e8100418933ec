"""Options are checked, are flags as well, and survive copies and YAML."""

import argparse
import copy
import dataclasses
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.options import (
    PaddedOptions,
    add_arguments,
    from_arguments,
    read_factor_table,
)

OPTIONS = PaddedOptions(
    capacity_pool="store", layer_factors={3: 1.5, 7: NO_DROP}, eval_factor=FIT, trace="traces"
)


def parse(*words: str) -> PaddedOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser, bare=("experts",))
    return from_arguments(parser.parse_args(words))


def test_flags_and_fields_are_the_same_thing():
    assert parse() == PaddedOptions()
    assert parse("--experts", "packed") == PaddedOptions(experts="packed")
    factors = "--padded-layer-factors", "3:1.5,7:no-drop", "--padded-eval-factor", "fit"
    rest = "--padded-capacity-pool", "store", "--padded-trace", "traces"
    assert parse(*factors, *rest) == OPTIONS
    # Defaults, as `--help` shows them.
    names = "layer-factors", "eval-factor", "trace"
    assert parse(*(word for name in names for word in (f"--padded-{name}", "none"))) == parse()


def test_the_former_name_of_cells_is_read():
    for given in (parse("--padded-capacity-pool", "expert"), PaddedOptions(capacity_pool="expert")):
        assert given == PaddedOptions(capacity_pool="cells")


TABLE = "map whole numbers from 1 on to factors above 0, each number once"
FACTOR = "be a number above 0, NO_DROP or None"
SHARE = "be a share from 0 to below 1"


@pytest.mark.parametrize(
    ("name", "fix"), [("exprts", "did you mean experts[?]"), ("x", "they are capacity_pool, exper")]
)
def test_an_option_that_there_is_not_is_named(name, fix):
    with pytest.raises(ValueError, match=f"^PaddedOptions must get .* has, got '{name}'; {fix}"):
        PaddedOptions(**{name: "packed"})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("experts", "own", "be one of auto, module, packed"),
        ("exchange", "two-level", "be one of auto, alltoall, direct"),
        ("capacity_pool", "receiver", "be one of auto, store, cells"),
        ("on_overflow", "drop", "be one of warn, error, retry"),
        ("overflow_threshold", 1.0, SHARE),
        ("overflow_threshold", "0.1", SHARE),
        ("overflow_threshold", None, SHARE),
        ("layer_factors", [(3, 1.5)], TABLE),
        ("layer_factors", {0: 1.5}, TABLE),
        ("layer_factors", {True: 1.5}, TABLE),
        ("layer_factors", "3:1.5", TABLE),
        ("layer_factors", {1: 0.0}, TABLE),
        ("layer_factors", {"1": 1.5}, TABLE),
        ("layer_factors", {1: FIT}, TABLE),
        ("eval_factor", 0, FACTOR),
        ("eval_factor", True, FACTOR),
        ("eval_factor", "2", FACTOR),
        ("trace", "", "be the name of a folder, or None"),
    ],
)
def test_wrong_values_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{field} must {rule}, got {value!r}')}"):
        PaddedOptions(**{field: value})


def test_options_that_need_packed_experts():
    for given, rule in (
        ({"capacity_pool": "store"}, "be auto or cells with experts='module', .* padded rows"),
        ({"exchange": "direct"}, "be auto or alltoall with experts='module'"),
    ):
        (name,) = given
        with pytest.raises(ValueError, match=rf"^{name} must {rule}, got .*; set experts='packed'"):
            PaddedOptions(experts="module", **given)
        for fitting in ("auto", "packed"):
            PaddedOptions(experts=fitting, **given)


def test_a_table_that_changes_later_changes_no_options():
    table: dict[int, Any] = {3: 1.5}
    options = PaddedOptions(layer_factors=table)
    table[0] = "one"
    assert options.layer_factors == {3: 1.5} and options in {PaddedOptions(layer_factors={3: 1.5})}


def test_help_shows_choices_and_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--padded-layer-factors LAYER:FACTOR,... factors of single layers" in text
    assert (
        "--padded-experts {auto,module,packed}, --experts {auto,module,packed} auto: packed" in text
    )
    defaults = [text.partition(" ")[0] for text in text.split("(default: ")[1:]]
    assert defaults == ["auto)"] * 3 + ["none)"] * 2 + ["warn)", "0.0)", "none)"]


def test_a_threshold_has_no_meaning_where_steps_are_repeated():
    with pytest.raises(ValueError, match=r"^overflow_threshold must be 0\.0 with on_overflow='re"):
        PaddedOptions(on_overflow="retry", overflow_threshold=0.1)


@pytest.mark.parametrize(
    ("flag", "text", "complaint"),
    [
        ("--padded-eval-factor", "abc", "must be a number above 0 or 'no-drop', got 'abc'"),
        ("--padded-eval-factor", "inf", "must be a number above 0 or 'no-drop', got 'inf'"),
        (
            "--padded-layer-factors",
            "0:2",
            "must be LAYER:FACTOR,... from layer 1 on, each once, got '0:2'",
        ),
        ("--padded-overflow-threshold", "x", "invalid float value: 'x'"),
    ],
)
def test_a_wrong_flag_is_named_with_what_to_give(capsys, flag, text, complaint):
    with pytest.raises(SystemExit):
        parse(flag, text)
    assert capsys.readouterr().err.rstrip().endswith(f"error: argument {flag}: {complaint}")


def test_a_table_of_factors():
    assert read_factor_table("3:1.5,10:no-drop") == {3: 1.5, 10: NO_DROP}
    assert read_factor_table("") == read_factor_table("none") == {}
    for text in ("3:1,3:2", "x:1", ":1", "1.5", "0:1"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"^must be LAYER:FACTOR,.* got {text!r}$"
        ):
            read_factor_table(text)
    for factor in ("", "0", "-1", "nan"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"^must be a number above 0 .*got {factor!r}"
        ):
            read_factor_table(f"3:{factor}")


def with_attributes_set(value: Any) -> Any:
    """Copy a value as Megatron-Bridge's `remove_non_pickleables` does: attribute by attribute."""
    if not hasattr(value, "__dict__"):
        return value
    copied = copy.copy(value)
    for name, attribute in vars(value).items():
        setattr(copied, name, with_attributes_set(attribute))
    return copied


def test_options_survive_copies_and_conversions():
    plain = dataclasses.asdict(OPTIONS)
    assert all(type(value) in (str, float, dict, type(None)) for value in plain.values())
    for copied in (
        pickle.loads(pickle.dumps(OPTIONS)),
        copy.deepcopy(OPTIONS),
        copy.copy(OPTIONS),
        dataclasses.replace(OPTIONS),
        PaddedOptions(**plain),
    ):
        assert copied == OPTIONS and hash(copied) == hash(OPTIONS)
    config = SimpleNamespace(inner=SimpleNamespace(word="x"), padded_dispatch=OPTIONS)
    walked = with_attributes_set(config)
    assert walked == config and walked.inner is not config.inner
