"""The failure that a rank reports when it has lost another one: retryable, and not a configuration error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from millrace.executor.wire.failures import EXIT_CRASH, exit_status, to_failure
from millrace.executor.wire.messages import Failure

LIMIT = timedelta(seconds=3)
"""Of gloo itself, for a message from the other rank."""


def run_rank(rank: int, port: int, fault: str, failures: Connection) -> None:
    """Sum a tensor together. Then rank 1 is lost as `fault` says, and rank 0 sends the failure that it gets."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=LIMIT, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        if fault == "leaves":
            dist.destroy_process_group()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "is killed" else signal.SIGSTOP)
        return
    try:
        dist.all_reduce(torch.ones(1_000_000))
    except RuntimeError as error:
        failure = to_failure(error)
        failures.send((failure.kind, failure.message, failure.is_retryable))


@pytest.mark.parametrize("fault", ["is killed", "is stopped", "leaves"])
def test_a_peer_that_is_lost_in_a_step_is_a_reason_to_try_again(fault: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # torch is imported once, for all of them
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=run_rank, args=(rank, port, fault, theirs)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        assert ours.poll(120)
        kind, message, is_retryable = ours.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert (kind, is_retryable) == ("RuntimeError", True), message
    assert "gloo" in message


def test_another_error_is_not_taken_for_a_lost_peer() -> None:
    assert not to_failure(RuntimeError("Timed out waiting for the file")).is_retryable
    assert not to_failure(RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes")).is_retryable


def test_a_start_that_failed_for_a_lost_peer_is_no_wrong_configuration() -> None:
    assert exit_status(Failure(kind="RuntimeError", message="", is_retryable=True)) == EXIT_CRASH
