"""The messages between the engine and its workers: start-up, steps, calls and failures.

This module imports the standard library, msgspec and `kv_layout` only, so both sides can import it. Each message is a frozen
tagged Struct, encoded as msgpack by one encoder and decoded by one typed decoder per direction. Messages on a socket are
`array_like`, which is small; new fields go last and have defaults.

Index ranges of one row of a step, for a sequence whose prompt has 5 tokens and which has generated 3:

    position        0   1   2   3   4 | 5   6   7
    token           p0  p1  p2  p3  p4| o0  o1  o2
    output position                   | 0   1   2
    in the KV pool  [0 ............... start)
    fed by this row                    [start, start + num_tokens)
    A row that reaches the last token yields the next one, here o3 at output position 3.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec

from millrace.executor.wire.kv_layout import KVLayout

SeqId = NewType("SeqId", int)
"""Identifies a sequence within one engine. An engine never reuses one."""

StepId = NewType("StepId", int)
"""Counts the steps of one engine from 1. Never reused, not even after a restart of the workers."""

NULL_BLOCK = 0
"""Block 0 belongs to no sequence. Padding is written to it, and it is never read."""


# --- start-up ------------------------------------------------------------------------------------------------------


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a rank. Sent once, in `Boot`."""

    model: str
    """A local directory with config.json and safetensors files."""
    device: str = "auto"
    """"auto" (cuda if there is a GPU; a restart keeps the choice), "cpu", "cuda" or "cuda:N"."""
    dtype: str = "auto"
    """"auto" (that of the checkpoint; float32 on a CPU that is slow with it), "float32", "bfloat16", "float16"."""
    quantization: str | None = None
    """"int8" rounds the weights of linear layers to 8 bits; only on a CPU."""
    attention: str = "auto"
    """"auto", "reference", "cpu" or "triton"."""
    enforce_eager: bool = False
    """Whether no step of a GPU runs as a graph."""
    batch_invariant: bool = False
    """Whether a token has the same bits whatever else a step computes. Refused where no kernel does that."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens. None: as in the model's config."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int | None = None
    """Size of the KV pool in blocks, block 0 included. None: from the memory options below."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool on this rank. None: derived from the free memory."""
    kv_cache_dtype: str = "auto"
    """Number format of the KV pool: "auto" (that of the activations), "float32", "bfloat16" or "fp8"."""
    swap_space_bytes: int = 0
    """Bytes of host memory for blocks that the KV pool of this rank evicts."""
    force_swap: bool = False
    """Whether there is a host tier also where the device is the host. For tests."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations and KV pool together may take."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_parallel_loading_workers: int | None = None
    """Ranks that may be in the phase load_model at a time, for a host with little memory. None: all."""
    tokenizer: str | None = None
    """A local directory with the tokenizer's files, for grammars. None: that of the model."""
    eos_token_ids: list[int] = []
    """With one of them, an output that follows a grammar ends."""
    weights: str | None = None
    """A local directory with the safetensors files, or with a LoRA adapter for `model`. None: that of the model."""


def output_rank(config: WorkerConfig) -> int:
    """Return the rank whose step results count: the first of the last stage."""
    # rank = stage * tensor_parallel_size + place in the stage
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know about the loaded model. Sent in `Ready`."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Tokens: the smaller of the model's limit and the configured one."""
    dtype: str
    device: str
    attention: str
    weight_bytes: int
    kv_bytes_per_block: int
    """Bytes of one block over the layers of a group on this rank, keys and values."""
    kv_layout: KVLayout
    weights_checksum: int = 0
    """Checksum of the weights on this rank. Equal in every start with the same parallel sizes and files."""
    kv_cache_dtype: str = ""
    scores_prompts: bool = True
    """Whether the rank can compute log-probabilities of prompt tokens."""
    is_recurrent: bool = False
    """Whether layers keep states, so that a sequence can only begin at its first token: no prefix is shared, and no block is
    moved to the host tier."""
    rope: str = ""
    """The set of rotary frequencies, "long" or "short", that max_model_len chooses of a model with longrope; one for each
    layer type that has it, with a space between. Empty: there is no choice."""


class Boot(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker, once, after `Hello`: become this rank."""

    epoch: int
    rank: int
    world_size: int
    config: WorkerConfig
    rendezvous: str = ""
    """Where the ranks connect to each other in this epoch: "tcp://host:port". Empty: one rank."""
    has_to_queue: bool = False
    """Whether the rank waits for `Go` before it enters the phase load_model."""


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker: the phase that the worker announced last may begin."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine, the first message: the process is up and listens."""

    pid: int
    protocol: int


class Phase(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine during start-up: the phase "import", "device" or "load_model" begins. Each has its own time limit;
    `Ready` ends the last one."""

    name: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine: the model is loaded, and the worker serves calls from now on."""

    facts: ModelFacts


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine, every second, from a thread and a socket of its own: the process is alive."""

    phase: str
    """What the worker does: a phase of the start, as in `Phase`, then "idle", "step", or the method that it runs."""
    device_bytes: int | None = None
    """Device memory that the rank held at its last sample. None before that, and where the device is the host."""
    device_utilization: float | None = None
    """Share of the time that the device computed, 0 to 1, at the last sample. None where it is unknown."""


class DumpStacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to worker, over the heartbeat's socket: send the stack of every thread. For ranks that no signal reaches."""


class Stacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine, over the heartbeat's socket: the answer to `DumpStacks`, for the engine's log."""

    text: str


PROTOCOL = 16
"""Version of these messages. The engine refuses a worker of another version at `Hello`."""


# --- grammars ------------------------------------------------------------------------------------------------------


class Compile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to worker: compile this grammar beside the steps, since a sequence waits for it. The numbers grow."""

    number: int
    grammar: str


class Compiled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine: the grammars up to this number are compiled, or have failed, which their steps will report."""

    number: int


# --- a step --------------------------------------------------------------------------------------------------------


class ThinkingLimit(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens may follow the start marker of thinking before the end marker has to come."""

    budget: int
    start_id: int
    end_id: int


class LogitsSettings(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What changes the logits of one sequence before the draw. All ids are in the vocabulary, and in no list twice."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    """None: all."""
    bad_words: list[list[int]] = []
    """Lists of ids, none of them empty. The last id is excluded where the output ends with those before it."""
    thinking: ThinkingLimit | None = None


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token of one sequence is drawn. The engine has validated it and filled in all defaults."""

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
    """The ids in `end_token_ids` cannot be drawn before the output has this many tokens."""
    end_token_ids: list[int]
    """Ids that would end the sequence (EOS unless ignored, stop ids); empty when min_tokens is 0."""
    processors: LogitsSettings | None = None
    """None: no other processor than that of min_tokens changes the logits."""
    logprobs: int | None = None
    """Number of most likely ids whose log-probabilities are wanted beside that of each sampled one. None: no
    log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    grammar: str = ""
    """That the output follows, in a form of llguidance. Empty: none."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the workers do not know yet. Later plans contain only its id. Sent again after a preemption."""

    seq_id: SeqId
    token_ids: list[int]
    """The prompt, and the output so far of a sequence that was resumed or preempted."""
    num_prompt_tokens: int
    sampling: RowSampling


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of one step, unless it is a decode row that goes on (see `StepPlan`)."""

    seq_id: SeqId
    start: int
    """Position of the first token fed = number of the sequence's tokens that are in the KV pool before this step."""
    num_tokens: int
    """Number of tokens fed. A row that reaches the last known token, or feeds the token sampled last, yields the next one.
    0: a fork. It has the same known tokens as the row before it, which reaches the last of them, and yields a token from the
    same logits."""
    new_blocks: list[int]
    """Block ids that this step appends to the sequence's block table, see `KVLayout`. `NULL_BLOCK` where a prefix hit has no
    block, since the group's window is past it."""


class StepPlan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step of the batch. Contains only differences from the last step of the same micro-batch.

    A row that yields a token goes on by itself: in the next step of its micro-batch it is a decode row, which feeds that
    token and yields the next one, until the sequence is in `finished` or `paused`, or has a row in another micro-batch. So
    the rows of a step are the decode rows that go on, in the order in which they began, then `rows`.

    Order of work: `swap_out` and `swap_in` in the order given, then drop `finished`, then `paused`, then add `new` and
    `new_blocks`, then run the rows, then `copy`. Ranks run the steps in the order in which they were sent, so a plan may
    reuse the blocks of a sequence that an earlier step in flight still writes.
    """

    step_id: StepId
    epoch: int
    """The epoch of the KV pool that the block ids belong to. Workers refuse a plan of another epoch."""
    depth: int
    """Steps in flight once this one is sent, itself included. At 1 the engine knows the outcome of all earlier steps. After
    a failed step workers refuse all plans up to the next one of depth 1."""
    num_tokens: int
    """Tokens that the step feeds, those of the decode rows that go on included."""
    num_sampled: int
    """Rows that yield a token, again with the decode rows that go on."""
    rows: list[StepRow] = []
    new: list[NewSequence] = []
    finished: list[SeqId] = []
    """Sequences to remove: ended, aborted, preempted, or with their last row in flight. Workers ignore unknown ids: the plan
    that was to add such a sequence may have been interrupted before it was sent."""
    paused: list[SeqId] = []
    """Sequences whose decode row does not go on. They stay known and can have a row in a later plan."""
    new_blocks: list[tuple[SeqId, int]] = []
    """Block ids that this step appends to the block tables of decode rows that go on: for each row one of each group."""
    micro_batch: int = 0
    """Which share of the sequences this step computes, where a pipeline has several; else 0."""
    swap_out: list[tuple[int, int]] = []
    """(device block, host block) pairs. Host blocks count from 0. No two pairs have the same host block."""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block) pairs. A host block may also be in `swap_out`: it is filled first."""
    copy: list[tuple[int, int]] = []
    """(source, destination) device blocks: a fork gets what the rows have written to a block that is not full. No block is
    both a source and a destination, or a destination twice."""


NO_TOKEN = -1
"""Takes the place of a token where a row could not be computed."""


def record_bytes(num_alternatives: int) -> int:
    """Return the size of a log-probability record: of a token the log-probability (float32) and its rank (uint32, 1 is the
    most likely id), then of each of the most likely ids, in this order, the id (uint32) and the log-probability (float32).
    All are little-endian, and of the softmax of the model's own logits."""
    return 8 * (1 + num_alternatives)


MAX_RECORD_BYTES = 32 * 1024 * 1024
"""Size of the records that a step may return. A reply has to stay below `channel.MAX_MESSAGE_BYTES`."""


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """One row that could not be computed. The other rows of the step have results."""

    seq_id: SeqId
    kind: Literal["nan_logits", "invalid_request"]
    """"invalid_request": the grammar of the sequence leaves no token, or none that the other fields of its request leave."""
    message: str


class StepResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of a step."""

    step_id: StepId
    epoch: int
    token_ids: list[int]
    """One token for each row that yields one, in the order of the rows. `NO_TOKEN` for a row that failed."""
    failures: list[RowFailure] = []
    """One for each `NO_TOKEN`, in the same order."""
    device_s: float = 0.0
    """Time from the start of the forward pass to the sampled ids, measured by the worker."""
    logprobs: list[bytes] = []
    """One record, see `record_bytes`, for each sampled token whose sequence wants them; meaningless for `NO_TOKEN`."""
    prompt_logprobs: list[bytes] = []
    """The records of the tokens behind those that a row of the plan feeds, as far as they are of the prompt, for each row
    with such tokens whose sequence wants them."""


# --- calls ---------------------------------------------------------------------------------------------------------

WORKER_METHODS = frozenset(
    {"determine_num_available_blocks", "initialize_cache", "check_health", "stats", "sleep", "wake_up"}
)
"""The methods that a `Call` may name, besides the executor's own "shutdown". A worker refuses all others, so no other
string from a socket reaches getattr."""


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Engine to worker: run one of `WORKER_METHODS`, and reply with the same id."""

    call_id: int
    method: str
    args: list[Any] = []


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine to worker: run one step. A message of its own, so that the plan is typed."""

    call_id: int
    plan: StepPlan


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a worker."""

    kind: str
    """Class name of the error, e.g. "OutOfMemoryError", "ValueError", "ModelError"."""
    message: str
    traceback: str = ""
    is_retryable: bool = False
    """Whether another attempt may succeed (out of memory, a lost device)."""
    cause: Literal["error", "out_of_memory", "device_lost"] = "error"


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine: the outcome of one `Call`: `result`, which may be None, or `failure`."""

    call_id: int
    result: Any = None
    failure: Failure | None = None


class StepReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to engine: the outcome of one `Step`. After a success only the output rank sends a result."""

    call_id: int
    result: StepResult | None = None
    failure: Failure | None = None


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Worker to engine instead of `Ready`: this phase failed, and the process exits."""

    phase: str
    failure: Failure


ToWorker = Boot | Go | Call | Step | Compile | DumpStacks
FromWorker = Hello | Phase | Ready | StartFailed | Reply | StepReply | Compiled | Beat | Stacks

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
