"""The Lua scripts, one for each transition of a job, each with the modules of `lua/lib/` that it includes.

A script is called as `EVALSHA <sha> 1 <prefix> <arguments>`. The server forgets scripts when it restarts, fails over or gets
SCRIPT FLUSH; it then answers NOSCRIPT, and the sender loads `source_of` the command.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

Argument = str | bytes | int | float
Command = tuple[str | bytes, ...]
"""One Redis command with its arguments, as `command` makes it."""

_FOLDER = Path(__file__).parent / "lua"


def resolve_includes(source: str, modules: Mapping[str, str]) -> str:
    """Return a script with the modules that it includes in place of the lines `-- include: <module> ...`.

    Each module comes once, after those that it includes itself. Each call of a script creates all its functions again, which
    may take longer than the transition, so the modules are small and a script includes only those that it uses. An indented
    line includes modules in one block of a function, which creates them only when it runs.
    """

    def expand(text: str, known: set[str], above: tuple[str, ...]) -> str:
        def included(line: re.Match[str]) -> str:
            visible, parts = set(known) if line[1] else known, []
            for name in line[2].split():
                assert name in modules, f"unknown include: {name}"
                assert name not in above, f"circular include: {' -> '.join((*above, name))}"
                if name not in visible:
                    visible.add(name)
                    parts.append(expand(modules[name], visible, (*above, name)))
            return "".join(parts)

        return re.sub(r"^( *)-- include: (.+)\n?", included, text, flags=re.MULTILINE)

    return expand(source, set(), ())


def _read(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.lua"))}


_MODULES = _read(_FOLDER / "lib")
SOURCES = {name: resolve_includes(source, _MODULES) for name, source in _read(_FOLDER).items()}
"""By name: the whole text of a script, as the server gets it."""
_SHAS = {name: hashlib.sha1(source.encode()).hexdigest() for name, source in SOURCES.items()}
_SOURCES_BY_SHA = {_SHAS[name]: source for name, source in SOURCES.items()}
_NUMBERS = frozenset((int, float))


def command(*arguments: Argument) -> Command:
    """Return a command with its numbers as text: hiredis (3.5) crashes when a signal raises while it writes a number."""
    return tuple([str(x) if type(x) in _NUMBERS else x for x in arguments])  # type: ignore[misc]  # the rest is text


def script_command(name: str, prefix: str, *arguments: Argument) -> Command:
    """Return the command that runs a script on the queue with this prefix."""
    return command("EVALSHA", _SHAS[name], "1", prefix, *arguments)


def is_script(sent: Command) -> bool:
    """Return whether `script_command` has made it."""
    return sent[0] == "EVALSHA"


def source_of(sent: Command) -> str:
    """Return the text of the script that a command of `script_command` runs."""
    return _SOURCES_BY_SHA[str(sent[1])]
