"""What child processes get of the environment."""

from __future__ import annotations

from millrace.executor.environment import SECRETS, without_secrets
from millrace.results.connection import URL_VARIABLES


def test_the_urls_of_the_server_are_secrets_and_the_rest_stays() -> None:
    named = {f"{name}{suffix}" for name in URL_VARIABLES for suffix in ("", "_FILE")}
    assert named < SECRETS
    environment = dict.fromkeys(SECRETS, "secret") | {"PATH": "/bin", "MILLRACE_FORCE_SWAP": "1"}
    assert without_secrets(environment) == {"PATH": "/bin", "MILLRACE_FORCE_SWAP": "1"}
