"""The table of Megatron's config fields against the Megatron that is installed."""

import dataclasses

import pytest
from megatron.core import package_info
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron.fields import (
    MOE_FIELDS,
    OTHER_FIELDS,
    VERSIONS,
    ConfigField,
)

ROWS = (*MOE_FIELDS, *OTHER_FIELDS)
INSTALLED = f"{package_info.MAJOR}.{package_info.MINOR}"
CONFIG_NAMES = {field.name for field in dataclasses.fields(TransformerConfig)}


def differences(names: set[str], version: str, rows: tuple[ConfigField, ...]) -> list[str]:
    """Return a line for each name that `rows` lack or have too many."""
    listed = {row.name for row in rows if version in row.versions}
    return [
        *(f"{name} is not in the table" for name in sorted(names - listed)),
        *(f"{name} is not in Megatron {version}" for name in sorted(listed - names)),
    ]


def test_the_installed_version_is_one_of_the_table():
    assert INSTALLED in VERSIONS


def test_every_moe_field_of_the_installed_megatron_is_in_the_table():
    names = {name for name in CONFIG_NAMES if name.startswith("moe_")}
    assert differences(names, INSTALLED, MOE_FIELDS) == []


def test_a_new_field_and_a_field_that_is_gone_are_noticed():
    names = {name for name in CONFIG_NAMES if name.startswith("moe_")}
    changed = names - {"moe_router_topk"} | {"moe_from_tomorrow"}
    assert differences(changed, INSTALLED, MOE_FIELDS) == [
        "moe_from_tomorrow is not in the table",
        f"moe_router_topk is not in Megatron {INSTALLED}",
    ]


@pytest.mark.parametrize("row", OTHER_FIELDS, ids=lambda row: row.name)
def test_other_fields_exist_in_the_versions_that_the_table_gives(row):
    assert (row.name in CONFIG_NAMES) == (INSTALLED in row.versions)


@pytest.mark.parametrize("rows", [MOE_FIELDS, OTHER_FIELDS], ids=["moe", "other"])
def test_rows_are_sorted_and_unique(rows):
    names = [row.name for row in rows]
    assert names == sorted(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_a_note_and_a_remedy_only_where_something_is_refused(row):
    assert row.note
    assert row.versions == tuple(v for v in VERSIONS if v in row.versions) != ()
    if row.status == "refused":
        assert row.refuses(True)
    assert row.status == "replaced" or not row.resets
    if row.status == "refused" or row.refuses is not ConfigField.refuses:
        assert row.remedy
    else:
        assert not row.remedy


@pytest.mark.parametrize(
    "row", [row for row in ROWS if INSTALLED in row.versions], ids=lambda row: row.name
)
def test_no_default_of_megatron_is_refused(row):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4
    )
    assert not row.refuses(getattr(config, row.name))
