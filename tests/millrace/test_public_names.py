"""`import millrace`: what is public, when it is loaded, and the errors for names that cannot be."""

from __future__ import annotations

import json

import pytest

import millrace
from tests.millrace.cli.command import python

LOADED = (
    "import json, sys; print(json.dumps([name for name in sys.modules if name in ('redis', 'msgspec', 'torch', 'rq')]))"
)


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    assert {name for name in millrace.__all__ if getattr(millrace, name) is None} == set()
    assert dir(millrace) == sorted(millrace.__all__)
    assert {"LLM", "Client", "AsyncClient", "GenerationRequest", "SamplingParams"} <= set(millrace.__all__)
    assert sorted(millrace.__all__, key=str.swapcase) == sorted(set(millrace.__all__), key=str.swapcase)


def test_a_name_is_loaded_when_it_is_first_used() -> None:
    for line in ("import millrace", "from millrace import JobNotFound"):
        assert json.loads(python("-c", f"{line}; {LOADED}").out) == []
    assert "torch" not in json.loads(python("-c", f"from millrace import Client, Job, LLM; {LOADED}").out)


def test_another_name_is_an_attribute_error() -> None:
    for name in ("Clent", "_MODULE", "errors"):
        with pytest.raises(AttributeError, match=f"module 'millrace' has no attribute '{name}'"):
            getattr(millrace, name)


def test_a_name_of_vllm_is_answered_with_ours() -> None:
    with pytest.raises(ImportError, match=r"^millrace has no GuidedDecodingParams; use StructuredOutputs, in struct"):
        from millrace import GuidedDecodingParams  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("package", ["zmq", "transformers"])
def test_without_the_engine_extra_the_error_says_what_to_install(package: str) -> None:
    ran = python("-c", f"import sys; sys.modules[{package!r}] = None; from millrace import Client, LLM")
    assert ran.err.splitlines()[-1] == (
        f"ImportError: millrace.LLM needs {package}; run in the checkout: pip install '.[engine]'"
    )
    ran = python("-c", f"import sys; sys.modules[{package!r}] = None; from millrace import Client, SamplingParams")
    assert (ran.status, ran.err) == (0, "")
