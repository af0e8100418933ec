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
    by_name,
    from_arguments,
)


def parse(*words: str) -> PaddedOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


def test_flags_and_fields_are_the_same_thing():
    assert parse() == PaddedOptions()
    numbers = "--padded-alignment", "16", "--padded-min-capacity", "4"
    assert parse(*numbers) == PaddedOptions(alignment=16, min_capacity=4)
    assert parse("--padded-experts", "packed") == PaddedOptions(experts="packed")


def test_defaults_choose_by_themselves():
    options = PaddedOptions()
    chosen = options.experts, options.exchange, options.microbatches_in_flight
    assert chosen == ("auto", "auto", "auto")


def test_unknown_experts_are_refused():
    with pytest.raises(ValueError, match="experts must be one of auto, module, packed, batched"):
        PaddedOptions(experts="own")
    with pytest.raises(SystemExit):
        parse("--padded-experts", "own")


def test_direct_stores_are_for_packed_experts():
    words = "--padded-exchange", "direct", "--padded-microbatches-in-flight", "4"
    options = parse("--padded-experts", "packed", *words)
    assert (options.exchange, options.microbatches_in_flight) == ("direct", 4)
    assert parse(*words).experts == "auto"
    message = (
        r"^exchange must be auto, alltoall or two-level with experts='module', got 'direct'; set "
    )
    with pytest.raises(ValueError, match=message):
        PaddedOptions(experts="module", exchange="direct")
    with pytest.raises(ValueError, match=r"exchange must be one of auto, .*, two-level, got"):
        PaddedOptions(exchange="mpi")  # pyright: ignore[reportArgumentType]


def test_options_of_another_exchange_are_refused():
    PaddedOptions(exchange="two-level", ranks_per_host=8)
    PaddedOptions(link_rows="each")  # auto may choose direct stores.
    with pytest.raises(ValueError, match=r"^ranks_per_host must be auto with exchange='auto'"):
        PaddedOptions(ranks_per_host=8)
    for exchange in ("alltoall", "two-level"):
        with pytest.raises(ValueError, match=rf"^link_rows must be auto with exchange='{exchange}"):
            PaddedOptions(exchange=exchange, link_rows="once")
    PaddedOptions(exchange="two-level", link_rows="summed")
    with pytest.raises(ValueError, match=r"^link_rows must be auto with exchange='alltoall'"):
        PaddedOptions(exchange="alltoall", link_rows="summed")


@pytest.mark.parametrize("experts", ["module", "batched"])
@pytest.mark.parametrize("capacity_pool", ["rank", "receiver"])
def test_pools_of_several_experts_are_for_packed_rows(capacity_pool, experts):
    message = (
        rf"^capacity_pool must be expert with experts='{experts}', which read padded rows, got "
        rf"'{capacity_pool}'; set experts='packed', or leave it to 'auto'$"
    )
    with pytest.raises(ValueError, match=message):
        PaddedOptions(capacity_pool=capacity_pool, experts=experts)
    assert PaddedOptions(capacity_pool=capacity_pool, experts="packed").experts == "packed"
    assert parse("--padded-capacity-pool", capacity_pool).capacity_pool == capacity_pool


def test_flags_take_fit_where_a_pass_can_be_eager():
    words = "--padded-eval-factor", "fit", "--padded-schedule", "0:fit,9:1.5"
    options = parse(*words, "--padded-layer-factors", "2:fit", "--padded-fit-max-factor", "no-drop")
    assert (options.eval_factor, options.fit_max_factor) == (FIT, NO_DROP)
    assert (options.schedule, options.layer_factors) == (((0, FIT), (9, 1.5)), {2: FIT})
    with pytest.raises(SystemExit):
        parse("--padded-grow-factors", "2,fit")


def test_a_trace_is_a_folder_and_a_parser_may_leave_it_out():
    assert parse().trace is None and parse("--padded-trace", "none").trace is None
    assert parse("--padded-trace", "traces").trace == "traces"
    with pytest.raises(ValueError, match=r"^trace must be the name of a folder, or None, got ''"):
        PaddedOptions(trace="")
    parser = argparse.ArgumentParser()
    add_arguments(parser, without=("trace",))
    assert from_arguments(parser.parse_args([])) == PaddedOptions()
    with pytest.raises(SystemExit):
        parser.parse_args(["--padded-trace", "traces"])


def test_alignment_is_a_number_or_auto():
    assert PaddedOptions().alignment == "auto"
    assert parse("--padded-alignment", "auto").alignment == "auto"
    with pytest.raises(SystemExit):
        parse("--padded-alignment", "all")


TABLE = "map whole numbers from {} on to factors above 0, each number once"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("alignment", 0, "be a whole number of at least 1, or 'auto'"),
        ("min_capacity", 0, "be a whole number of at least 1"),
        ("on_overflow", "stop", "be one of drop, warn, error, grow, retry"),
        ("overflow_threshold", 1.0, "be a share from 0 to below 1"),
        ("agreement_timeout", 0.0, "be a finite number of seconds above 0"),
        ("agreement_timeout", float("inf"), "be a finite number of seconds above 0"),
        ("grow_after", 0, "be a whole number of at least 1"),
        ("telemetry_every", -1, "be a whole number of at least 1"),
        ("microbatches_in_flight", 0, "be a whole number of at least 1, or 'auto'"),
        ("ranks_per_host", 0, "be a whole number of at least 1, or 'auto'"),
        ("reroute_rounds", True, "be a whole number of at least 1"),
        ("policy", "rand", "be one of megatron, probs, position, random, priority"),
        ("remedy", "renorm", "be one of none, renormalize, reroute"),
        ("layer_factors", {0: 1.5}, TABLE.format(1)),
        ("layer_factors", "3:1.5", TABLE.format(1)),
        ("layer_factors", {1: 0.0}, TABLE.format(1)),
        ("eval_factor", 0, "be a number above 0, NO_DROP, FIT or None"),
        ("eval_factor", "2", "be a number above 0, NO_DROP, FIT or None"),
        ("fit_max_factor", 0, "be a number above 0, or NO_DROP"),
        ("fit_max_factor", FIT, "be a number above 0, or NO_DROP"),
        ("capacity_pool", "node", "be one of expert, rank, receiver"),
        ("grow_factors", (2.0, FIT), "be a tuple of rising factors above 0"),
        ("schedule", ((200, -1.0),), TABLE.format(0)),
        ("schedule", ((1, 2.0), (1, 3.0)), TABLE.format(0)),
        ("schedule", (200,), TABLE.format(0)),
        ("grow_factors", (2.0, 1.5), "be a tuple of rising factors above 0"),
        ("grow_factors", (NO_DROP, 2.0), "be a tuple of rising factors above 0"),
        ("grow_factors", (1.5, 1.5), "be a tuple of rising factors above 0"),
    ],
)
def test_wrong_values_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{field} must {rule}, got {value!r}')}"):
        PaddedOptions(**{field: value})


def test_flags_parse_factors():
    factors = "--padded-layer-factors", "3:1.5,7:no-drop", "--padded-eval-factor", "no-drop"
    steps = "--padded-schedule", "0:2,200:1.25", "--padded-grow-factors", "2,no-drop"
    options = parse(*factors, *steps)
    assert options.layer_factors == {3: 1.5, 7: NO_DROP}
    assert options.eval_factor == NO_DROP
    assert options.schedule == ((0, 2.0), (200, 1.25))
    assert options.factor_of_step == {0: 2.0, 200: 1.25}
    assert options.grow_factors == (2.0, NO_DROP)
    assert (parse().layer_factors, parse().eval_factor, parse().schedule) == ({}, None, ())
    flags = "layer-factors", "eval-factor", "schedule"  # Their defaults, as `--help` shows them.
    assert parse(*(word for name in flags for word in (f"--padded-{name}", "none"))) == parse()


@pytest.mark.parametrize(
    ("flag", "text", "complaint"),
    [
        ("--padded-eval-factor", "abc", "must be a number above 0, 'no-drop' or 'fit', got 'abc'"),
        ("--padded-schedule", "200", "must be NUMBER:FACTOR,... with each number once, got '200'"),
        ("--padded-microbatches-in-flight", "x", "must be a whole number or 'auto', got 'x'"),
        ("--padded-seed", "x", "must be of type int, got 'x'"),
    ],
)
def test_a_wrong_flag_is_named_with_what_to_give(capsys, flag, text, complaint):
    with pytest.raises(SystemExit):
        parse(flag, text)
    assert capsys.readouterr().err.rstrip().endswith(f"error: argument {flag}: {complaint}")


def test_lists_of_yaml_files_are_taken():
    options = PaddedOptions(schedule=[[0, 2], [40, 1.25]], grow_factors=[2, 3])  # pyright: ignore
    assert options == PaddedOptions(schedule=((0, 2), (40, 1.25)), grow_factors=(2, 3))


OPTIONS = PaddedOptions(
    layer_factors={3: 1.5}, schedule=((0, 2.0),), grow_factors=(2.0, NO_DROP), eval_factor=FIT
)


def test_options_survive_copies_and_conversion_to_a_dict():
    assert pickle.loads(pickle.dumps(OPTIONS)) == OPTIONS
    assert copy.deepcopy(OPTIONS) == OPTIONS == copy.copy(OPTIONS)
    assert dataclasses.replace(OPTIONS) == OPTIONS
    assert (
        PaddedOptions(**dataclasses.asdict(OPTIONS)) == OPTIONS == PaddedOptions(**by_name(OPTIONS))
    )


def with_attributes_set(value: Any) -> Any:
    """Copy a value as Megatron-Bridge's `remove_non_pickleables` does: attribute by attribute."""
    if not hasattr(value, "__dict__"):
        return value
    copied = copy.copy(value)
    for name, attribute in vars(value).items():
        setattr(copied, name, with_attributes_set(attribute))
    return copied


def test_options_survive_a_walk_that_sets_every_attribute():
    config = SimpleNamespace(inner=SimpleNamespace(word="x"), padded_dispatch=OPTIONS)
    walked = with_attributes_set(config)
    assert walked == config and walked.inner is not config.inner
    assert walked.padded_dispatch == OPTIONS
