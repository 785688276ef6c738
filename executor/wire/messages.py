"""What crosses the border between the engine and its workers: start-up, steps, calls and failures.

Standard library and msgspec only, so that both sides can import it. Everything is a frozen tagged Struct, encoded as
msgpack by one encoder and decoded by one typed decoder per direction. What shares a socket is `array_like`: small, and
new fields go last, with defaults.

Index ranges of one row of a step, for a sequence whose prompt has 5 tokens and which has generated 3:

    position        0   1   2   3   4 | 5   6   7
    token           p0  p1  p2  p3  p4| o0  o1  o2
    output position                   | 0   1   2
    in the KV pool  [0 ............... start)
    fed by this row                    [start, start + num_tokens)
    a row that reaches the last known token yields the next one (`samples`), here o3 at output position 3
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec

SeqId = NewType("SeqId", int)
"""One sequence inside one engine; never reused within the engine's life."""

StepId = NewType("StepId", int)
"""Counts the steps of one engine from 1 on; never reused, also not after a restart of the workers."""

NULL_BLOCK = 0
"""Block 0 belongs to nobody: padding writes land there and nothing is ever read from it."""


# --- start-up ------------------------------------------------------------------------------------------------------


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank needs to know before it can load its model. Sent once, in `Boot`."""

    model: str
    """A local directory with config.json and safetensors files."""
    device: str = "auto"
    """"auto" (cuda when there is one; a restart keeps to it), "cpu", "cuda" or "cuda:N"."""
    dtype: str = "auto"
    """"auto" (what the checkpoint says; float32 on a CPU that would be slow otherwise), "float32", "bfloat16", "float16"."""
    attention: str = "auto"
    """"auto", "reference" or "cpu"."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens. None: what the model's config says."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int | None = None
    """Size of the KV pool in blocks, block 0 included. None: from the memory options below."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool on this rank. None: chosen from what is free."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations and KV pool together may take."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_parallel_loading_workers: int | None = None
    """How many ranks may be in the phase load_model at a time, where host memory is short. None: all at once."""


def output_rank(config: WorkerConfig) -> int:
    """The rank whose step results count: rank = stage * tensor_parallel_size + place in the stage, and this is the first
    of the last stage."""
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has to know of the loaded model. Travels in `Ready`."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Tokens; min(what the model allows, what the configuration asks for)."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    attention: str
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_block: int
    """Bytes of one block over all layers of this rank, keys and values."""
    weights_checksum: int = 0
    """Of a sample of what this rank has loaded. Another start with the same parallel sizes and files has the same."""


class Boot(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker, once, after `Hello`: become this rank."""

    epoch: int
    rank: int
    world_size: int
    config: WorkerConfig
    rendezvous: str = ""
    """Where the ranks of this epoch meet, as torch.distributed's init_method: "tcp://127.0.0.1:<port>". Empty: one rank."""
    has_to_queue: bool = False
    """Whether the rank waits for `Go` before it enters the phase load_model."""


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker: the phase that it announced last may begin."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine, first of all: the process is up and listens."""

    pid: int
    protocol: int


class Phase(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine during start-up: the named phase begins now, "import", "device" or "load_model". Each has its own
    time limit; `Ready` ends the last one."""

    name: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine: the model is loaded and calls are served from now on."""

    facts: ModelFacts


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine, every second from a thread and a socket of its own: the process is alive, and what it does."""

    phase: str
    """One of the start, as in `Phase`, then "idle", "step", or the method that it runs."""
    device_bytes: int | None = None
    """Device memory that the rank held when it last looked; None where the device is the host, or before the first look."""
    device_utilization: float | None = None
    """Share of the time that the device computed when it last looked, 0 to 1; None where it does not tell."""


class DumpStacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to worker, over the heartbeat's socket: tell the stack of every thread. For ranks that no signal reaches."""


class Stacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine, over the heartbeat's socket: the answer to `DumpStacks`, for the engine's log."""

    text: str


PROTOCOL = 4
"""Version of these messages. A worker of another version is refused at `Hello`."""


# --- a step --------------------------------------------------------------------------------------------------------


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of one sequence is drawn. Resolved and validated by the engine; nothing optional is left open."""

    temperature: float
    """0.0: greedy."""
    top_k: int
    """0: off."""
    top_p: float
    """1.0: off."""
    min_p: float
    """0.0: off."""
    seed: int
    """64 bits, unsigned. With `candidate`, output position and token id it determines the draw."""
    candidate: int
    """Index among the n candidates of one request."""
    min_tokens: int
    """Until this many tokens are out, the ids in `end_token_ids` cannot be drawn."""
    end_token_ids: list[int]
    """Ids that would end the sequence (EOS unless ignored, stop ids); empty when min_tokens is 0."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence as the workers first see it; whole once, later only its id. Sent again after a preemption."""

    seq_id: SeqId
    token_ids: list[int]
    """Prompt and the output so far (a resumed or preempted sequence already has some)."""
    num_prompt_tokens: int
    sampling: RowSampling


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of one step. 256 of them travel in 4 KB, so nothing is said twice."""

    seq_id: SeqId
    start: int
    """Position of the first token fed = number of the sequence's tokens that are in the KV pool before this step."""
    num_tokens: int
    """Tokens fed, 1 or more."""
    input_lag: int
    """Where the last token fed comes from. 0: from `NewSequence.token_ids`. k > 0: it is what this sequence's row of step
    `step_id - k` sampled. NO_TOKEN: it is not the last known token of the sequence, and the row yields none."""
    new_blocks: list[int]
    """Block ids appended to the sequence's block table by this step."""

    @property
    def samples(self) -> bool:
        """Whether this row yields a token: it does when it reaches the last known token of its sequence."""
        return self.input_lag != NO_TOKEN


NO_TOKEN = -1
"""As `StepRow.input_lag`: more of the sequence is still to be fed."""


class StepPlan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step of the batch: data, differences only. Order of work: free `finished`, then `swap_out`, `swap_in`, `copy`
    in the order given, then take in `new`, then run `rows`."""

    step_id: StepId
    epoch: int
    """The life of the KV pool that the block ids belong to. Workers refuse a plan of another epoch."""
    depth: int
    """Steps in flight once this one is sent, itself included; 1 means that nothing runs ahead."""
    rows: list[StepRow]
    new: list[NewSequence] = []
    finished: list[SeqId] = []
    """Sequences to forget: ended, aborted or preempted since the last plan. Their blocks may be reused by this plan. Workers
    pass over ids that they do not know: the plan that was to bring them may have been interrupted before it was sent."""
    swap_out: list[tuple[int, int]] = []
    """(device block, host block) pairs."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block) pairs."""
    copy: list[tuple[int, int]] = []
    """(source, destination) device blocks."""


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """One row that could not be computed; the rest of its batch is fine."""

    seq_id: SeqId
    kind: Literal["nan_logits"]
    message: str


class StepResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a step brought: one entry per row with `samples`, in plan order, failed rows left out."""

    step_id: StepId
    epoch: int
    seq_ids: list[SeqId]
    num_tokens: list[int]
    """Tokens that each row yields, 1 or more."""
    token_ids: list[int]
    """The rows' tokens, one row after the other: sum(num_tokens) ids."""
    failures: list[RowFailure] = []
    device_s: float = 0.0
    """Time from the start of the forward pass to the sampled ids, as the worker saw it."""


# --- calls ---------------------------------------------------------------------------------------------------------

WORKER_METHODS = frozenset(
    {"determine_num_available_blocks", "initialize_cache", "check_health", "stats", "sleep", "wake_up"}
)
"""All that a call may name, but for the executor's own "shutdown"; a step is no call but a `Step`. A worker refuses anything
else, so no string from a socket reaches getattr."""


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker: run one of `WORKER_METHODS` and reply under the same id."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to worker: a call of `execute_model`, in the shape that keeps the plan typed."""

    call_id: int
    plan: StepPlan


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a worker, as it crosses the wire."""

    kind: str
    """Class name of the error, e.g. "OutOfMemoryError", "UnknownMethod", "ModelError"."""
    message: str
    traceback: str = ""
    is_retryable: bool = False
    """True when the same work may succeed on another attempt (out of memory, a lost device)."""
    cause: Literal["error", "out_of_memory", "device_lost"] = "error"


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine: the outcome of one `Call`; exactly one of the two is set unless the result is None."""

    call_id: int
    result: Any = None
    failure: Failure | None = None


class StepReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine: the outcome of one `Step`. Of the ranks that did well, only the output rank sends a result."""

    call_id: int
    result: StepResult | None = None
    failure: Failure | None = None


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine instead of `Ready`: the named phase went wrong; the process exits after it."""

    phase: str
    failure: Failure


ToWorker = Boot | Go | Call | Step | DumpStacks
FromWorker = Hello | Phase | Ready | StartFailed | Reply | StepReply | Beat | Stacks

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
