import argparse
import dataclasses

import pytest

from padded_dispatch.megatron.options import (
    PaddedOptions,
    add_arguments,
    from_arguments,
    markdown_table,
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


def test_unknown_experts_are_refused():
    with pytest.raises(ValueError, match="experts='own' is not possible: choose one of module, pa"):
        PaddedOptions(experts="own")
    with pytest.raises(SystemExit):
        parse("--padded-experts", "own")


def test_direct_stores_are_for_packed_experts():
    words = "--padded-exchange", "direct", "--padded-microbatches-in-flight", "4"
    options = parse("--padded-experts", "packed", *words)
    assert (options.exchange, options.microbatches_in_flight) == ("direct", 4)
    with pytest.raises(ValueError, match="exchange='direct' is not possible: it needs experts="):
        PaddedOptions(exchange="direct")
    with pytest.raises(ValueError, match="exchange='mpi' is not possible: choose one of nccl, dir"):
        PaddedOptions(exchange="mpi")  # pyright: ignore[reportArgumentType]


def test_alignment_is_a_number_or_auto():
    assert PaddedOptions().alignment == "auto"
    assert parse("--padded-alignment", "auto").alignment == "auto"
    with pytest.raises(SystemExit):
        parse("--padded-alignment", "all")


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("alignment", 0, "give a whole number of at least 1, or 'auto'"),
        ("on_overflow", "stop", "choose one of drop, warn, error, grow"),
        ("overflow_threshold", 1.0, "give a share from 0 to below 1"),
        ("grow_after", 0, "give a whole number of at least 1"),
        ("telemetry_every", -1, "give a whole number of at least 1"),
        ("microbatches_in_flight", 0, "give a whole number of at least 1"),
        ("reroute_rounds", 0, "give a whole number of at least 1"),
        ("policy", "rand", "choose one of megatron, probs, position, random, priority"),
        ("remedy", "renorm", "choose one of none, renormalize, reroute"),
        ("layer_factors", "0:1.5", "each number once, from 1 on"),
        ("eval_factor", "0", "give a number above 0, or 'no-drop'"),
        ("schedule", "200", "give NUMBER:FACTOR"),
        ("grow_factors", "2,1.5", "give rising factors"),
    ],
)
def test_impossible_values_are_refused(field, value, remedy):
    with pytest.raises(ValueError, match=f"^{field}={value!r} is not possible: .*{remedy}"):
        PaddedOptions(**{field: value})


def test_factors_are_read():
    options = PaddedOptions(
        layer_factors="3:1.5,7:no-drop", eval_factor="no-drop", schedule="0:2,200:1.25"
    )
    assert options.factor_of_layer == {3: 1.5, 7: None}
    assert options.eval_factors == (None,)
    assert options.factor_of_step == {0: 2.0, 200: 1.25}
    assert options.factors_to_grow == (1.5, 2.0, 3.0, 4.0, None)
    assert PaddedOptions().eval_factors == ()


def test_table_has_one_row_per_option():
    rows = markdown_table().splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        f"`{option.name}`" for option in dataclasses.fields(PaddedOptions)
    ]
    assert rows[0] == (
        "| `min_capacity` | `--padded-min-capacity` | 1 | least slots per (source rank, expert), "
        "whatever the factor |  |"
    )
    [policy] = [row for row in rows if "`policy`" in row]
    assert policy.endswith("sure tokens | probs 32 us, position 21, random 31, priority 75 |")
    [schedule] = [row for row in rows if "`schedule`" in row]
    assert schedule.startswith("| `schedule` | `--padded-schedule` | none | capacity factors over")
