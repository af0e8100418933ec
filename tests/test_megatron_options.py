import argparse

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
    assert parse("--padded-alignment", "16", "--padded-min-capacity", "4") == PaddedOptions(
        alignment=16, min_capacity=4
    )


def test_table_has_one_row_per_option():
    assert markdown_table().splitlines()[2:] == [
        "| `min_capacity` | `--padded-min-capacity` | 1 | least slots per (source rank, expert), "
        "whatever the factor |",
        "| `alignment` | `--padded-alignment` | 1 | rows of an expert's buffer are a multiple of "
        "this |",
    ]
