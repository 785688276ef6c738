"""The defaults that a program sets in torch for itself change nothing in a worker that runs in its process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from llguidance import LLMatcher

import millrace.worker
from millrace.executor.wire.messages import LogitsSettings, RowSampling, ThinkingLimit
from tests.worker.driver import Driver, start_worker
from tests.worker.models import make_model

TINY_MODEL = Path(__file__).parents[2] / "examples" / "tiny_model"
START, END = 5, 6
CONSTRUCTORS = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
    | {"randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
)
SETTINGS = [
    LogitsSettings(),
    LogitsSettings(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    LogitsSettings(logit_bias={27: 1.5, 9: -1.0}),
    LogitsSettings(allowed_token_ids=[3, 9, 20, 27]),
    LogitsSettings(bad_words=[[9], [20, 27]]),
    LogitsSettings(thinking=ThinkingLimit(2, START, END)),
]
DRAWS = [(0.0, 0, 1.0, 0.0), (0.9, 0, 1.0, 0.0), (0.8, 20, 0.9, 0.02)]
"""Temperature, top_k, top_p and min_p."""


def samplings(grammar: str) -> list[RowSampling]:
    """Return each processor, greedy and at random."""
    rows = [
        RowSampling(*draw, seed, 0, 0, [], settings, logprobs=2)
        for seed, (draw, settings) in enumerate(product(DRAWS, SETTINGS))
    ]
    rows += [RowSampling(*draw, 7, 0, 3, [20, 27], prompt_logprobs=2) for draw in DRAWS]
    return rows + [RowSampling(*draw, 8, 0, 0, [], grammar=grammar) for draw in DRAWS if grammar]


def generated(path: Path, grammar: str, attention: str) -> list[list[object]]:
    """Return the tokens and the log-probability records of each sequence."""
    worker = start_worker(path, attention=attention, eos_token_ids=[0])
    rows = samplings(grammar)
    prompts = [[START, *range(10 + index, 20 + index)] for index in range(len(rows))]
    requests = Driver(worker, 1, keeps_logits=False).run(prompts, 6, rows)
    worker.shutdown()
    return [
        [each.output, each.failure, [record.hex() for record in each.records], each.prompt_records.hex()]
        for each in requests
    ]


def generated_by_both(plain: Path) -> list[list[list[object]]]:
    """Return what the example model generates, and a model whose forward pass is that of transformers."""
    grammar = LLMatcher.grammar_from_regex("[0-9]{20}")
    return [generated(TINY_MODEL, grammar, "auto"), generated(plain, "", "reference")]


def generated_with(defaults: str, path: Path) -> list[list[list[object]]]:
    """Return what a process generates that executes `defaults` before anything else."""
    code = f"""import torch; {defaults}
from tests.worker.test_torch_defaults import *
print(json.dumps(generated_by_both(Path({str(path)!r}))))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    result: list[list[list[object]]] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    make_model("llama", path, model_type="gpt2")
    return path


@pytest.fixture(scope="module")
def expected(gpt2: Path) -> list[list[list[object]]]:
    return generated_by_both(gpt2)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_defaults_of_the_program_change_no_token(
    dtype: str, gpt2: Path, expected: list[list[list[object]]]
) -> None:
    """On the device "meta" tensors have no values, so that a worker fails that makes one there."""
    assert all(tokens and failure is None for model in expected for tokens, failure, *_ in model)
    found = generated_with(f"torch.set_default_dtype(torch.{dtype}); torch.set_default_device('meta')", gpt2)
    assert found == expected


def test_each_new_tensor_names_its_device_and_its_dtype() -> None:
    """Those that are made on a GPU only, too. `arange` of integers has integers."""
    unnamed = [
        f"{path}:{call.lineno} {ast.unparse(call)}"
        for path in Path(millrace.worker.__path__[0]).rglob("*.py")
        for call in constructions(ast.parse(path.read_text()))
        if not required(call) <= {keyword.arg for keyword in call.keywords}
    ]
    assert unnamed == []


def constructions(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner == "torch" and name in CONSTRUCTORS:
                yield node


def required(call: ast.Call) -> set[str | None]:
    is_of_integers = ast.unparse(call.func) == "torch.arange" and not any(
        isinstance(node, ast.Constant) and isinstance(node.value, float) for node in ast.walk(call)
    )
    return {"device"} if is_of_integers else {"device", "dtype"}
