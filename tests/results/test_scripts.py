"""The Lua scripts and the modules that they include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.results import scripts

FOLDER = Path(scripts.__file__).with_name("lua")
MODULES = {path.stem: path.read_text() for path in sorted((FOLDER / "lib").glob("*.lua"))}
FILES = {path.relative_to(FOLDER).as_posix(): path.read_text() for path in sorted(FOLDER.rglob("*.lua"))}


def names_defined(source: str) -> set[str]:
    lines = re.findall(r"^local (?:function )?([\w, ]+)", source, re.MULTILINE)
    return {name.strip() for line in lines for name in line.split(",")}


def names_included(source: str) -> list[str]:
    return [name for line in re.findall(r"^ *-- include: (.+)$", source, re.MULTILINE) for name in line.split()]


def names_used(source: str) -> set[str]:
    """The identifiers of a source, without those in strings and comments, and without fields of tables."""
    code = re.sub(r"--.*|'[^'\n]*'", "", source)
    return set(re.findall(r"^[a-z_]\w*|(?<![\w.])[A-Za-z_]\w*\b(?!\s*=[^=])", code, re.MULTILINE))


_BLOCK = r"^(( +)-- include: ([^\n]+)\n(.*?)\n(?!\2)(?= *(?:end|else)))"
"""An indented include, and the block up to its end: the first line that is indented less."""


@pytest.mark.parametrize("name", FILES)
def test_a_script_includes_what_it_uses_and_nothing_else(name: str) -> None:
    used = names_used(FILES[name]) - names_defined(FILES[name])
    needed = {module for module, source in MODULES.items() if used & names_defined(source)}
    assert set(names_included(FILES[name])) == needed - {Path(name).stem}


@pytest.mark.parametrize("name", FILES)
def test_what_a_block_includes_is_used_only_in_that_block(name: str) -> None:
    everywhere = set(re.findall(r"[\w]+", " ".join(re.findall(r"^-- include: (.+)$", FILES[name], re.MULTILINE))))
    outside, blocks = FILES[name], list[tuple[str, str]]()
    for line, indent, modules, block in re.findall(_BLOCK, FILES[name], re.MULTILINE | re.DOTALL):
        outside = outside.replace(line, "")
        blocks += [(block, module) for module in modules.split()]
        assert indent
    for block, module in blocks:
        assert module not in everywhere
        assert names_used(block) & names_defined(MODULES[module]), "every block uses what it includes"
    for module in {module for _, module in blocks}:
        assert not names_used(outside) & names_defined(MODULES[module])


def test_no_two_modules_define_the_same_name() -> None:
    defined = [name for source in MODULES.values() for name in names_defined(source)]
    assert sorted(defined) == sorted(set(defined))


def test_modules_come_once_and_before_what_needs_them() -> None:
    modules = {"a": "-- include: b c\nA\n", "b": "-- include: c\nB\n", "c": "C\n"}
    text = scripts.resolve_includes("-- A script.\n-- include: a\nS", modules)
    assert [line for line in text.splitlines() if not line.startswith("--")] == ["C", "B", "A", "S"]


def test_an_indented_include_is_visible_in_its_block_only() -> None:
    modules = {"a": "A\n", "b": "-- include: a\nB\n", "c": "-- include: a b\nC\n"}
    text = scripts.resolve_includes("-- include: a\n  -- include: b\nS\n  -- include: c\n", modules)
    assert text.split() == ["A", "B", "S", "B", "C"]


@pytest.mark.parametrize(
    ("source", "wrong"), [("-- include: x", "unknown include: x"), ("-- include: a", "a -> b -> a")]
)
def test_an_include_that_is_unknown_or_circular_is_refused(source: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        scripts.resolve_includes(source, {"a": "-- include: b", "b": "-- include: a"})
