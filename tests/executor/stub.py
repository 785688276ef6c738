"""A test double: a worker without a model. Use it with `worker_module="tests.executor.stub"`.

It has no KV tensors and needs no torch. The next token of a sequence is a fixed function of its last token and its
position, so a lost, doubled or misplaced token changes the output. It checks the plans: a number of tokens that is not that
of the rows, a row that does not start at the sequence's next position, a block that does not hold what the sequence's
tokens would have written, a fork of other tokens, and a plan of another epoch are errors. What is swapped and copied is
checked by that too.

The option `model` is a comma-separated list of options of the stub:

    slow=MS               duration of a step
    late=MS               time from every other step to its result on the rank whose tokens count, and from the steps in
                          between on the other ranks
    die-on-token=N        a prompt with this token kills the worker
    most-tokens=N         a larger step runs out of memory
    candidates-differ     the next token depends on the index of the candidate, too
    windows=A/B           groups of layers and their sliding windows in tokens; 0 for no window
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import (
    ModelFacts,
    NewSequence,
    SeqId,
    StepPlan,
    StepResult,
    StepRow,
    WorkerConfig,
    output_rank,
)

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 2048
DEVICE_S = 1e-6
"""What each step reports as the time of the device."""


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> StubWorker:
    return StubWorker(epoch, config, rank, world_size)


def next_token(last_token: int, position: int, candidate: int = 0) -> int:
    """Return the token after `last_token` at `position`. Never 0, which ends a sequence."""
    return 1 + (last_token * 31 + position * 7 + candidate * 13) % (VOCAB_SIZE - 1)


def record(token_id: int, num_alternatives: int) -> bytes:
    """Return the log-probability record of a token, see `record_bytes`. Each token has one of its own."""
    alternatives = [value for rank in range(num_alternatives) for value in (token_id + rank, -(token_id + rank) / 1024)]
    return struct.pack("<fI" + "If" * num_alternatives, -token_id / 1024, 1, *alternatives)


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's class."""


class _Sequence:
    """Owns the tokens and blocks of one sequence."""

    def __init__(self, new: NewSequence) -> None:
        self.token_ids = list(new.token_ids)
        self.known = new.token_ids
        """Tokens that came with the plan."""
        self.num_prompt_tokens, self.sampling = new.num_prompt_tokens, new.sampling
        self.num_computed: int | None = None
        """None before its first row, which begins behind what the prefix cache has."""
        self.blocks: list[int] = []


class StubWorker:
    """Owns the sequences of one rank. Implements `Worker`."""

    def __init__(self, epoch: int, config: WorkerConfig, rank: int = 0, world_size: int = 1) -> None:
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._config = config
        self._faults = _parse_faults(config.model)
        self._windows = tuple(int(window) or None for window in str(self._faults.get("windows", 0)).split("/"))
        self._sequences: dict[SeqId, _Sequence] = {}
        self._decodes: dict[int, list[SeqId]] = {}
        """By micro-batch: the sequences whose decode rows go on."""
        self._has_failed = False
        """Whether a step has failed, and the engine may not know it yet."""
        self._slots: dict[tuple[int, int], int] = {}
        """By block and offset: a checksum of all tokens up to the one that was written there."""
        self._host: dict[int, dict[int, int]] = {}
        """By host block and offset: the same."""
        self._num_blocks = self._num_host_blocks = 0
        self._results: deque[tuple[float, StepResult]] = deque()
        """With the times when they are ready, the oldest first."""
        self.last_rows: list[StepRow] = []
        """All rows of the last step. For tests."""
        self._num_steps = 0
        self._is_on_disk = False
        self._last_compiled = 0

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        on_phase("device")
        self.fault_at("device")
        on_phase("load_model")
        self.fault_at("start")
        return ModelFacts(
            architecture="Stub",
            vocab_size=VOCAB_SIZE,
            max_model_len=self._config.max_model_len or MAX_MODEL_LEN,
            dtype="float32",
            device="cpu",
            attention="none",
            weight_bytes=(1 + self._rank) * 2**20,
            kv_bytes_per_block=self._kv_bytes_per_block,
            kv_layout=KVLayout(
                self._config.block_size,
                self._windows,
                self._config.max_num_batched_tokens,
                self._config.max_model_len or MAX_MODEL_LEN,
            ),
        )

    @property
    def _kv_bytes_per_block(self) -> int:
        return (1 + self._rank) * self._config.block_size

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self._config.num_blocks or 4096, self._config.swap_space_bytes // self._kv_bytes_per_block

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> float:
        self.fault_at("kv-pool")
        self._num_blocks, self._num_host_blocks = num_device_blocks, num_host_blocks
        self._forget_blocks()
        return 0.0

    def launch(self, plan: StepPlan) -> None:
        if plan.depth == 1:
            self._has_failed = False
            self._results.clear()
        if self._has_failed:
            raise ValueError("an earlier step has failed")
        self._has_failed = True
        result = self._execute(plan)
        is_late = (self._rank == output_rank(self._config)) == (self._num_steps % 2 == 0)
        delay_s = self._faults.get("late", 0) / 1000 if is_late else 0.0
        self._results.append((time.monotonic() + delay_s, result))
        self._has_failed = False

    def collect(self) -> StepResult:
        ready_s, result = self._results.popleft()
        time.sleep(max(0.0, ready_s - time.monotonic()))
        return result

    def is_result_ready(self) -> bool:
        return time.monotonic() >= self._results[0][0]

    @property
    def has_idle_work(self) -> bool:
        return False

    def do_idle_work(self) -> None:
        """There is none."""

    def compile_grammar(self, number: int, grammar: str) -> None:
        self._last_compiled = number

    @property
    def last_compiled(self) -> int:
        return self._last_compiled

    def _execute(self, plan: StepPlan) -> StepResult:
        self._num_steps += 1
        time.sleep(self._faults.get("slow", 0) / 1000)
        self.fault_at("step", self._num_steps)
        if plan.epoch != self._epoch:
            raise ValueError(f"plan of epoch {plan.epoch} in epoch {self._epoch}")
        self.last_rows = rows = self._update(plan)
        self._run_out_of_memory(plan)
        self._wait_for_ranks(plan)
        sampled = {row.seq_id: token for row in rows if (token := self._run(row)) is not None}
        self._check_forks(rows)
        self._slots |= {
            (destination, offset): self._slots[source, offset]
            for source, destination in plan.copy
            for offset in range(self._config.block_size)
            if (source, offset) in self._slots
        }
        self._decodes[plan.micro_batch] = list(sampled)
        return StepResult(
            plan.step_id,
            plan.epoch,
            list(sampled.values()),
            device_s=DEVICE_S,
            logprobs=[
                record(token_id, count)
                for seq_id, token_id in sampled.items()
                if (count := self._sequences[seq_id].sampling.logprobs) is not None
            ],
            prompt_logprobs=[records for row in plan.rows if (records := self._score_prompt(row))],
        )

    def _score_prompt(self, row: StepRow) -> bytes:
        sequence = self._sequences[row.seq_id]
        count, end = sequence.sampling.prompt_logprobs, min(row.start + row.num_tokens + 1, sequence.num_prompt_tokens)
        scored = [] if count is None else sequence.token_ids[row.start + 1 : end]
        return b"".join(record(token_id, count or 0) for token_id in scored)

    def _update(self, plan: StepPlan) -> list[StepRow]:
        """Apply the differences and return all rows."""
        for seq_id in plan.finished:
            self._sequences.pop(seq_id, None)
        gone = {*plan.finished, *plan.paused}
        moved = {row.seq_id for row in plan.rows}
        for number, seq_ids in self._decodes.items():
            left = [seq_id for seq_id in seq_ids if seq_id not in gone]
            self._decodes[number] = left if number == plan.micro_batch else [each for each in left if each not in moved]
        self._swap(plan)
        for new in plan.new:
            self._sequences[new.seq_id] = _Sequence(new)
        for seq_id, block_id in plan.new_blocks:
            self._sequences[seq_id].blocks.append(block_id)
        decodes = self._decodes.get(plan.micro_batch, [])
        rows = [StepRow(seq_id, self._sequences[seq_id].num_computed or 0, 1, []) for seq_id in decodes] + plan.rows
        num_tokens = sum(row.num_tokens for row in rows)
        if num_tokens != plan.num_tokens or len({row.seq_id for row in rows}) < len(rows):
            raise ValueError(f"step {plan.step_id} has {plan.num_tokens} tokens, but these rows: {rows}")
        return rows

    def _swap(self, plan: StepPlan) -> None:
        """Copy the blocks. What a block has held before is gone."""
        block_size = self._config.block_size
        for device_block, host_block in plan.swap_out:
            if not 0 <= host_block < self._num_host_blocks:
                raise ValueError(f"block {host_block} is not of the host tier")
            self._host[host_block] = {
                offset: self._slots[device_block, offset]
                for offset in range(block_size)
                if (device_block, offset) in self._slots
            }
        for host_block, device_block in plan.swap_in:
            for offset in range(block_size):
                self._slots.pop((device_block, offset), None)
            for offset, checksum in self._host[host_block].items():
                self._slots[device_block, offset] = checksum

    def _forget_blocks(self) -> None:
        self._slots.clear()
        self._host.clear()

    def check_health(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        """Report a device that holds a byte per token, and whose utilization grows with each step."""
        return {
            "rank": self._rank,
            "num_steps": self._num_steps,
            "num_sequences": len(self._sequences),
            "device_bytes": sum(len(sequence.token_ids) for sequence in self._sequences.values()),
            "device_total_bytes": 2**20,
            "device_utilization": min(1.0, self._num_steps / 10),
            "pool_budget": "set by the stub",
        }

    def sleep(self, level: int) -> None:
        self.fault_at("sleep")
        self._sequences.clear()
        self._decodes.clear()
        self._is_on_disk |= level == 2

    def wake_up(self, tags: list[str], epoch: int, new_weights: str | None = None) -> int:
        self.fault_at("wake-up")
        self._epoch = epoch
        self._forget_blocks()
        self._is_on_disk &= "weights" not in tags
        return 0

    def shutdown(self) -> None:
        self.fault_at("shutdown")
        self._sequences.clear()

    def _run(self, row: StepRow) -> int | None:
        sequence = self._sequences[row.seq_id]
        sequence.blocks.extend(row.new_blocks)
        end = row.start + row.num_tokens
        if sequence.num_computed not in (None, row.start) or end > len(sequence.token_ids):
            raise ValueError(f"{row} does not start at {sequence.num_computed} of {len(sequence.token_ids)}")
        if end > len(sequence.blocks) // len(self._windows) * self._config.block_size:
            raise ValueError(f"{row} has no block for position {end - 1}")
        if row.num_tokens > 0:
            self._write_and_read(sequence, row)
        if self._faults.get("die-on-token") in sequence.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        sequence.num_computed = end
        if end < len(sequence.token_ids):
            return None
        candidate = sequence.sampling.candidate if "candidates-differ" in self._faults else 0
        sequence.token_ids.append(next_token(sequence.token_ids[-1], end, candidate))
        return sequence.token_ids[-1]

    def _write_and_read(self, sequence: _Sequence, row: StepRow) -> None:
        """Write what the row computes. Everything before it has to be what its own tokens would have written."""
        checksum = 0
        for position, token_id in enumerate(sequence.token_ids[: row.start + row.num_tokens]):
            checksum = zlib.crc32(token_id.to_bytes(4, "little"), checksum)
            column, offset = divmod(position, self._config.block_size)
            for group, window in enumerate(self._windows):
                if window is not None and position <= row.start - window:
                    continue
                slot = (sequence.blocks[column * len(self._windows) + group], offset)
                if not 0 < slot[0] < self._num_blocks:
                    raise ValueError(f"block {slot[0]} is not of the pool")
                if position >= row.start:
                    self._slots[slot] = checksum ^ group
                elif self._slots.get(slot) != checksum ^ group:
                    raise ValueError(f"{row}: block {slot[0]} does not hold position {position} of its tokens")

    def _check_forks(self, rows: list[StepRow]) -> None:
        """A fork has the same known tokens as the row before it, which may be a fork of the same tokens."""
        for number, row in enumerate(rows):
            if row.num_tokens > 0:
                continue
            known, before = self._sequences[row.seq_id].known, self._sequences[rows[number - 1].seq_id]
            if number == 0 or before.num_computed != len(known) or before.token_ids[: len(known)] != known:
                raise ValueError(f"{row} is no fork of the row before it")

    # --- faults, for test doubles that override these ---

    def fault_at(self, place: str, when: object = True) -> None:
        """Called at "device", "start", "kv-pool", "step", "sleep", "wake-up" and "shutdown". May fail or not return."""

    def _has_fault(self, fault: str, when: object) -> bool:
        return False

    def _run_out_of_memory(self, plan: StepPlan) -> None:
        most = self._faults.get("most-tokens", plan.num_tokens)
        if plan.num_tokens > most or self._has_fault("oom-at-step", self._num_steps):
            raise OutOfMemoryError(f"no memory for {plan.num_tokens} tokens")

    def _wait_for_ranks(self, plan: StepPlan) -> None:
        """Called in every step before its rows are computed."""


def _parse_faults(text: str) -> dict[str, Any]:
    faults: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        faults[name] = int(value) if value.isdigit() else value or True
    return faults


if __name__ == "__main__":
    from millrace.executor.rank.serve import serve_rank

    sys.exit(serve_rank(create_worker))
