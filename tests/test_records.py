"""Records convert to JSON and back, and errors name the field that is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MachineError, PenstockError, RecordError
from penstock.records import Bytes, from_json, layout, parse, to_json


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    value: float
    label: str = ""

    def __post_init__(self) -> None:
        if self.value < 0:
            raise MachineError("value", f"must be 0 or more, got {self.value}")

    @classmethod
    def from_number(cls, number: float) -> Leaf:
        return cls(value=number, label="short")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    FORMAT: ClassVar[int] = 3

    version: int = 3
    kind: Literal["oak", "elm"]
    colour: Colour = Colour.RED
    nbytes: Bytes = 0
    alive: bool = True
    rings: Literal[1, 2] = 1
    maybe: Bytes | None = None
    must_say: int | None
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    distances: Mapping[int, float] = dataclasses.field(default_factory=dict)
    named: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


OAK: dict[str, object] = {"kind": "oak", "must_say": None}

whole = st.integers(-(2**63) + 1, 2**63 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.builds(Leaf, value=real.map(abs), label=st.text())
trees = st.builds(
    Tree,
    kind=st.sampled_from(["oak", "elm"]),
    colour=st.sampled_from(Colour),
    nbytes=whole,
    alive=st.booleans(),
    rings=st.sampled_from([1, 2]),
    maybe=st.none() | whole,
    must_say=st.none() | whole,
    leaf=st.none() | leaves,
    leaves=st.lists(leaves, max_size=3).map(tuple),
    distances=st.dictionaries(st.integers(-(10**17), 10**17), real, max_size=3),
    named=st.dictionaries(st.text(), leaves, max_size=3),
)
anything = st.recursive(
    st.none() | st.booleans() | whole | real | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(deadline=None)  # the machine may be busy, and these tests are not about time
@given(trees)
def test_writing_and_reading_returns_an_equal_record(tree: Tree) -> None:
    assert from_json(Tree, parse(layout(to_json(tree)))) == tree


@settings(deadline=None)
@given(trees, st.data())
def test_a_changed_file_is_read_or_raises_a_record_error(tree: Tree, data: st.DataObject) -> None:
    document = to_json(tree)
    assert isinstance(document, dict)
    mutate(document, data)
    message = "tree.json: fine"
    try:
        assert isinstance(from_json(Tree, document, where="tree.json"), Tree)
    except RecordError as refused:
        message = str(refused)
    assert message.startswith("tree.json: ")


def mutate(document: dict[str, object], data: st.DataObject) -> None:
    """Replace, add or remove a random value somewhere in the document."""
    at: dict[str, object] | list[object] = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from([*keys, "new"]) if keys else st.just("new"))
        inner = at[key] if key in keys else None  # type: ignore[index, call-overload]
        if isinstance(inner, dict | list) and data.draw(st.booleans()):
            at = inner
            continue
        if key in keys and data.draw(st.booleans()):
            del at[key]  # type: ignore[arg-type]
        elif isinstance(at, dict):
            at[str(key)] = data.draw(anything)
        else:
            at.append(data.draw(anything))
        return


@settings(deadline=None)
@given(st.text() | st.binary() | anything.map(json.dumps))
def test_any_text_parses_or_raises_a_record_error(text: str | bytes) -> None:
    with contextlib.suppress(RecordError):
        json.dumps(parse(text), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "ash"}, 't.json: kind: must be "oak" or "elm", got "ash"'),
        ({"kind": 1}, 't.json: kind: must be "oak" or "elm", got 1'),
        ({"colour": "green"}, 't.json: colour: must be "red" or "blue", got "green"'),
        ({"alive": 1}, "t.json: alive: must be true or false, got 1"),
        ({"rings": True}, "t.json: rings: must be 1 or 2, got true"),
        ({"version": True}, "t.json: version: must be a whole number, got true"),
        ({"version": 2.5}, "t.json: version: must be a whole number, got 2.5"),
        ({"must_say": 2**63}, "t.json: must_say: must be a whole number, got 9223372036854775808"),
        ({"nbytes": "6 furlongs"}, "t.json: nbytes: must be a number of bytes such as 4096 or"),
        ({"maybe": [1]}, "t.json: maybe: must be a number of bytes such as 4096 or"),
        ({"leaf": {}}, "t.json: leaf.value: is missing; it must be a number"),
        ({"leaf": "x"}, 't.json: leaf: must be an object {...} or a number, got "x"'),
        ({"leaf": {"value": float("inf")}}, "t.json: leaf.value: must be a number, got Infinity"),
        ({"leaf": {"value": 10**400}}, "t.json: leaf.value: must be a number, got 1000"),
        ({"leaf": -1}, "t.json: leaf.value: must be 0 or more, got -1.0"),
        ({"leaves": {"value": 1}}, "t.json: leaves: must be a list, got"),
        ({"leaves": [1, {"value": "2"}]}, 't.json: leaves[1].value: must be a number, got "2"'),
        ({"leaves": [1, {"value": -2}]}, "t.json: leaves[1].value: must be 0 or more, got -2.0"),
        ({"distances": {"01": 1}}, 't.json: distances: must have whole numbers for keys, got "01"'),
        ({"distances": {"7": "x"}}, 't.json: distances[7]: must be a number, got "x"'),
        ({"named": {"a": {"valeu": 1}}}, "named[a].valeu: is not a field here; did you mean value"),
        ({"zzz": 1}, "t.json: zzz: is not a field here; the fields are version, kind, colour"),
    ],
)
def test_an_invalid_field_is_named_with_the_expected_and_actual_value(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(RecordError, match=re.escape(message)):
        from_json(Tree, OAK | change, where="t.json")


def test_a_missing_field_is_named_with_the_expected_value() -> None:
    with pytest.raises(RecordError, match='kind: is missing; it must be "oak" or "elm"'):
        from_json(Tree, {})


def test_a_record_must_be_an_object() -> None:
    with pytest.raises(RecordError, match=r"^t.json: must contain an object \{...\}, got \[1\]$"):
        from_json(Tree, [1], where="t.json")


def test_a_newer_version_is_rejected_before_its_unknown_fields() -> None:
    with pytest.raises(RecordError, match=r"version: is 4, .* up to 3; upgrade Penstock"):
        from_json(Tree, {"version": 4, "bark": 80})


def test_the_caller_chooses_the_exception_class() -> None:
    with pytest.raises(MachineError) as caught:
        from_json(Tree, OAK | {"alive": 0}, where="t.json", error=MachineError)
    assert (caught.value.where, caught.value.field) == ("t.json", "alive")
    assert isinstance(caught.value, PenstockError)
    assert isinstance(caught.value, ValueError)


def test_sizes_may_have_a_unit_and_are_written_as_numbers() -> None:
    tree = from_json(Tree, OAK | {"nbytes": "64GiB", "maybe": 1e9})
    assert (tree.nbytes, tree.maybe) == (64 << 30, 10**9)
    assert type(tree.maybe) is int
    assert to_json(tree) == {
        "version": 3, "kind": "oak", "colour": "red", "nbytes": 64 << 30, "alive": True, "rings": 1,
        "maybe": 10**9, "must_say": None,
    }  # fmt: skip


def test_a_record_with_from_number_may_be_written_as_a_number() -> None:
    tree = from_json(Tree, OAK | {"leaf": 2, "leaves": [3.5]})
    assert tree.leaf == Leaf(value=2.0, label="short")
    assert tree.leaves == (Leaf(value=3.5, label="short"),)


def test_only_fields_that_are_empty_by_default_are_omitted() -> None:
    assert to_json(Leaf(value=0.0)) == {"value": 0.0}
    written = to_json(Tree(kind="elm", must_say=None))
    assert written == {
        "version": 3, "kind": "elm", "colour": "red", "nbytes": 0, "alive": True, "rings": 1,
        "must_say": None,
    }  # fmt: skip


def test_a_nan_is_rejected_when_written() -> None:
    with pytest.raises(RecordError, match=r"leaves\[0\].value: must be finite"):
        to_json(Tree(kind="oak", must_say=1, leaves=(Leaf(value=float("nan")),)))
