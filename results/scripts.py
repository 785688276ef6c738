"""The Lua scripts, one for each transition of a job, each with the shared prelude in front of it.

A script is called as `EVALSHA <sha> 1 <prefix> <arguments>`. The server forgets scripts when it restarts, fails over or
is told to; it then answers NOSCRIPT, and `source_of` gives whoever sent the command what to load.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

Argument = str | bytes | int | float
Command = tuple[str | bytes, ...]
"""One Redis command with its arguments, as `command` makes it."""

_FOLDER = Path(__file__).parent / "lua"
_SOURCES = {path.stem: path.read_text() for path in sorted(_FOLDER.glob("[!_]*.lua"))}
_PRELUDE = (_FOLDER / "_prelude.lua").read_text()


def script_source(name: str) -> str:
    """The whole text of a script, as the server gets it.

    Every call of a script makes all its functions anew, which takes longer than many a transition; so of the prelude only
    what the script uses is put in front of it. The whole prelude would do the same.
    """
    own = _SOURCES[name]
    used, needed = _words(own), []
    for paragraph in reversed(_PRELUDE.split("\n\n")):
        if used & set(_DEFINED.findall(paragraph)):
            used |= _words(paragraph)
            needed.append(paragraph)
    return "\n\n".join([*reversed(needed), own])


_DEFINED = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)


def _words(source: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"--.*", "", source)))


_SHAS = {name: hashlib.sha1(script_source(name).encode()).hexdigest() for name in _SOURCES}
_NAMES = {sha: name for name, sha in _SHAS.items()}
_NUMBERS = frozenset((int, float))


def command(*arguments: Argument) -> Command:
    """Numbers as text: hiredis (3.5) crashes when a signal, such as Ctrl-C, raises while it writes a number."""
    return tuple([str(x) if type(x) in _NUMBERS else x for x in arguments])  # type: ignore[misc]  # the rest is text


def script_command(name: str, prefix: str, *arguments: Argument) -> Command:
    """The command that runs a script on the queue with this prefix."""
    return command("EVALSHA", _SHAS[name], "1", prefix, *arguments)


def is_script(sent: Command) -> bool:
    """Whether it is one of `script_command`."""
    return sent[0] == "EVALSHA"


def source_of(sent: Command) -> str:
    """The text of the script that a command of `script_command` runs."""
    return script_source(_NAMES[str(sent[1])])
