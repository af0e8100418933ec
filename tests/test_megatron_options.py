import argparse

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


def test_table_has_one_row_per_option():
    assert markdown_table().splitlines()[2:] == [
        "| `min_capacity` | `--padded-min-capacity` | 1 | least slots per (source rank, expert), "
        "whatever the factor |",
        "| `alignment` | `--padded-alignment` | 1 | rows of an expert's buffer are a multiple of "
        "this |",
        "| `experts` | `--padded-experts` | module | module: the experts of the layer's spec, on "
        "padded rows; packed: ours, which compute real rows only |",
    ]
