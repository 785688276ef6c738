"""Writes docs/cli.md and docs/python.md from the command's parsers and the docstrings of the public names.

`make docs` runs it. A test fails while a page is not what this writes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

import millrace
from millrace.cli import build_parser
from millrace.engine_service.config import make_parser

DOCS = Path(__file__).resolve().parent
NOTE = "`make docs` writes this page.\n"
GROUPS = {
    "Clients": ("Client", "AsyncClient"),
    "Requests": ("GenerationRequest", "SamplingParams", "StructuredOutputs"),
    "Results": (
        "Job",
        "CompletionOutput",
        "ToolCall",
        "Usage",
        "JobError",
        "Timings",
        "StreamEvent",
        "Logprob",
        "Position",
        "BatchStatus",
        "QueueStats",
        "TenantStats",
        "RejectedEntry",
    ),
    "Without a queue": ("LLM", "RequestOutput", "EngineArgs"),
}
"""The public names by heading, without the errors."""
_WITHOUT_ENTRY = {
    "Retried",
    "StructuredOutputsParams",
    "SubmitOptions",
    "Submitted",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
}
"""Public names that the entries of others explain."""


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text)


def pages() -> dict[str, str]:
    """Return the generated pages by file name."""
    return {"cli.md": _cli_page(), "python.md": _python_page()}


# --- the command ---


def _cli_page() -> str:
    parser = build_parser()
    with patch.dict(os.environ, COLUMNS="100"):  # argparse wraps to it
        lines = ["# The command\n", NOTE, _help(parser)]
        for name, verb in _verbs(parser):
            lines.append(f"## millrace {name}\n\n{_help(make_parser() if name == 'serve' else verb)}")
    return "\n".join(lines)


def _verbs(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield all verbs that have options of their own, in the order of the help."""
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, verb in verbs.choices.items():
        if any(isinstance(action, argparse._SubParsersAction) for action in verb._actions):
            yield from _verbs(verb, f"{prefix}{name} ")
        else:
            yield prefix + name, verb


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```\n{parser.format_help().rstrip()}\n```\n"


# --- the package ---


def _python_page() -> str:
    lines = [
        "# The Python package\n",
        NOTE,
        "All names are imported from `millrace`. None of them imports torch before it is used.\n",
    ]
    grouped = {name for names in GROUPS.values() for name in names}
    errors = [name for name in millrace.__all__ if name not in grouped | _WITHOUT_ENTRY]
    assert all(issubclass(getattr(millrace, name), Exception) for name in errors), "a class is in none of GROUPS"
    for heading, names in {**GROUPS, "Errors": tuple(errors)}.items():
        lines.append(f"## {heading}\n")
        for name in names:
            lines += _describe(name, getattr(millrace, name))
    return "\n".join(lines)


def _describe(name: str, kind: type) -> Iterator[str]:
    assert vars(kind).get("__doc__"), f"{name} needs a docstring of its own: an inherited one describes another class"
    if issubclass(kind, BaseException):
        base = kind.__bases__[0].__name__
        yield f"- **`{name}`** ({base}): {_text(kind)}"
        yield from _error_attributes(kind)
        return
    yield f"### {name}\n\n{_text(kind)}\n"
    if issubclass(kind, msgspec.Struct):
        yield from _fields(kind)
    else:
        init = inspect.getdoc(kind.__init__)
        yield f"```\n{name}{_signature(kind)}\n```\n"
        if init and init != inspect.getdoc(object.__init__):
            yield f"{init}\n"
    same = []
    for member, value in vars(kind).items():
        is_property = isinstance(value, property)
        if member.startswith("_") or not (is_property or inspect.isfunction(value)):
            continue
        text = _text(value.fget if is_property else value)
        if text and kind is not millrace.AsyncClient:  # whose methods have the texts of Client's
            yield f"- **`{member}`**: {text}" if is_property else f"- **`{member}{_signature(value)}`**: {text}"
        else:
            same.append(f"`{member}`")
    yield f"The methods are {', '.join(same)}.\n" if same else ""


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    texts = _attribute_docs(kind)
    yield "| field | default | |\n|---|---|---|"
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else f"`{_default(field)}`"
        yield f"| `{field.name}` | {default} | {texts.get(field.name, '')} |"
    yield ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"{type(value).__name__}()" if isinstance(value, msgspec.Struct) else repr(value)


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, on one line each. A docstring may speak for all fields before it."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = _docstring_in(following)
    return found


def _error_attributes(kind: type) -> Iterator[str]:
    """Yield an item for each documented attribute that `__init__` sets, after one for the others together."""
    if (function := vars(kind).get("__init__")) is None:
        return
    (init,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(init, ast.FunctionDef)
    texts = {}
    for statement, following in zip(init.body, [*init.body[1:], None], strict=True):
        match statement:
            case ast.Assign(targets=[ast.Attribute(attr=name)]) | ast.AnnAssign(target=ast.Attribute(attr=name)):
                texts[name] = _docstring_in(following)
    if others := [f"`{name}`" for name, text in texts.items() if not text]:
        yield f"  - {', '.join(others)}"
    for name, text in texts.items():
        if text:
            yield f"  - `{name}`: {text}"


def _docstring_in(statement: ast.stmt | None) -> str:
    """Return the docstring that the statement after an attribute is; "" if it is another one."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return _one_line(text)
    return ""


def _signature(function: Any) -> str:
    parameters = list(inspect.signature(function).parameters.values())
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name != "self"]
    return str(inspect.Signature(shown))


def _text(documented: Any) -> str:
    """Return a docstring with the lines of a paragraph joined."""
    paragraphs = (inspect.getdoc(documented) or "").split("\n\n")
    return "\n\n".join(map(_one_line, paragraphs)).replace(
        "\n\n", "\n\n  " if inspect.isfunction(documented) else "\n\n"
    )


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    main()
