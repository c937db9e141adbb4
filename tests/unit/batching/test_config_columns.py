"""The extra columns that a run declares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError
from turnstream.types import DeclaredColumn

ROUTES = DeclaredColumn(name="routes", per="first_tokens", dtype="uint8", shape=(2, 4))
STYLE = DeclaredColumn(name="style", per="row", dtype="float32", shape=(3,))


def make(**fields: Any) -> BatchingConfig:
    return BatchingConfig(**{"batch_groups": 4, "mini_batch_groups": 2, **fields})


def column(**fields: Any) -> DeclaredColumn:
    return DeclaredColumn(**{"name": "x", "per": "token", "dtype": "int32", **fields})


def test_keeps_extra_columns_in_order_of_name() -> None:
    config = make(extra_columns=[column(), ROUTES])

    assert [declared.name for declared in config.extra_columns] == ["routes", "x"]


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"name": "two words"}, "extra_columns", "'two words'"),
        ({"name": "größe"}, "extra_columns", "'größe'"),
        ({"name": "x" * 65}, "extra_columns", "'x"),
        ({"name": 7}, "extra_columns", "7"),
        ({"per": "turn"}, r"extra_columns\['x'\].per", "'turn'"),
        ({"dtype": "uint16"}, r"extra_columns\['x'\].dtype", "'uint16'"),
        ({"dtype": "text"}, r"extra_columns\['x'\].dtype", "'text'"),
        ({"shape": (2, 0)}, r"extra_columns\['x'\].shape", r"\(2, 0\)"),
        ({"shape": (1.5,)}, r"extra_columns\['x'\].shape", r"\(1.5,\)"),
        ({"shape": (1,) * 5}, r"extra_columns\['x'\].shape", r"\(1, 1"),
        ({"shape": 3}, r"extra_columns\['x'\].shape", "3"),
        ({"fill": 0.5}, r"extra_columns\['x'\].fill", "0.5"),
        ({"fill": 2**31}, r"extra_columns\['x'\].fill", "2147483648"),
        ({"fill": float("nan"), "dtype": "float32"}, r"extra_columns\['x'\].fill", "nan"),
        ({"fill": 1e5, "dtype": "float16"}, r"extra_columns\['x'\].fill", "100000.0"),
        ({"fill": "0"}, r"extra_columns\['x'\].fill", "'0'"),
        ({"is_optional": 1}, r"extra_columns\['x'\].is_optional", "1"),
        ({"is_constant": True}, r"extra_columns\['x'\].is_constant", "True"),
        ({"per": "first_tokens"}, r"extra_columns\['x'\].shape", r"\(\)"),
        (
            {"per": "first_tokens", "dtype": "int64", "shape": (1, 2)},
            r"extra_columns\['x'\].dtype",
            "'int64'",
        ),
        (
            {"per": "first_tokens", "dtype": "uint8", "shape": (1, 257)},
            r"extra_columns\['x'\].dtype",
            "'uint8'",
        ),
        ({"per": "first_tokens", "shape": (1, 2), "fill": 1}, r"extra_columns\['x'\].fill", "1"),
    ],
)
def test_refuses_a_declaration_that_cannot_be_by_field_and_value(
    fields: dict[str, Any], field: str, value: str
) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{field}: .*{value}"):
        column(**fields)


def test_refuses_a_name_that_is_declared_twice() -> None:
    with pytest.raises(InvalidConfigError, match=r"^extra_columns: 'x' is declared twice"):
        make(extra_columns=(column(), column(dtype="float32")))


@pytest.mark.parametrize("given", [7, [7], [{"name": "x"}], [{"names": "x"}], "ab"])
def test_refuses_what_is_no_list_of_declarations(given: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"^extra_columns: .* is not a list of decl"):
        make(extra_columns=given)


def test_refuses_to_merge_turns_that_may_differ_in_a_value_per_row() -> None:
    constant = dataclasses.replace(STYLE, is_constant=True)

    with pytest.raises(InvalidConfigError, match=r"^extra_columns\['style'\].is_constant: .*merge"):
        make(extra_columns=(STYLE,))

    assert make(extra_columns=(STYLE,), merge=False).extra_columns == (STYLE,)
    assert make(extra_columns=(constant,)).extra_columns == (constant,)
