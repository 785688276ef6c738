"""Several ranks of a model generate the same as one rank, and each holds only its part."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from millrace.executor.wire.messages import (
    NO_TOKEN,
    NewSequence,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepRow,
)
from millrace.worker import runner as runner_module
from millrace.worker.kernels.library import find_kernels
from millrace.worker.linear.packed import PackedLinear, RowMasks
from millrace.worker.parallel.peers import MOST_GATHERED_BYTES
from millrace.worker.parallel.stages import find_stage_input
from millrace.worker.rank import Rank
from tests.worker.device_double import WRONG_VALUE, DeviceDouble, DeviceEvent
from tests.worker.driver import GREEDY, Driver, Request, execute, num_sequences, pool_bytes, start_worker
from tests.worker.logprobs import WANTED, check_logprobs, with_logprobs
from tests.worker.models import CONFIGS, DYNAMIC_ROPE, LONG_ROPE, VOCAB_SIZE, build_model, make_model
from tests.worker.parallel.ranks import RankFailed, RankProcesses
from tests.worker.processors.test_grammar import GRAMMAR, byte_level

pytestmark = pytest.mark.ranks

LENGTHS = (1, 5, 30, 41, 12)
FORKED = (30, 5)
"""Lengths of prompts that come a second time."""
MAX_TOKENS = 8
PROMPT = [5, 6, 7, 8, 9]

SAMPLING = [
    GREEDY,
    RowSampling(1.0, 0, 1.0, 0.0, 7, 0, 0, []),
    RowSampling(0.8, 40, 0.9, 0.0, 7, 1, 0, []),
    RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 3, list(range(100))),
    GREEDY,
    RowSampling(0.9, 0, 1.0, 0.0, 7, 1, 0, []),
    RowSampling(0.9, 0, 1.0, 0.0, 7, 2, 0, []),
]
EXPERTS = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "rope_parameters": None,
    "sliding_window": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "v_head_dim": 16,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
}
WINDOWS_AT_THE_END = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 2,
}
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
SIZES = {"TP 2": (2, 1), "PP 2": (1, 2), "TP 2 x PP 2": (2, 2)}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {arch: tmp_path_factory.mktemp(arch) for arch in CONFIGS}
    for arch, path in paths.items():
        make_model(arch, path)
    return paths


def prompts() -> list[list[int]]:
    source = random.Random(1)
    given = {length: [source.randrange(VOCAB_SIZE - 3) for _ in range(length)] for length in LENGTHS}
    return [given[length] for length in (*LENGTHS, *FORKED)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ranks_together_give_the_log_probabilities_of_one_rank(
    sizes: tuple[int, int], processes: RankProcesses, models: dict[str, Path]
) -> None:
    sampling = [with_logprobs(each, *wanted) for each, wanted in zip(SAMPLING, WANTED, strict=True)]
    different = [[*prompt[:-1], number] for number, prompt in enumerate(prompts())]
    with processes.group(models["qwen2"], *sizes) as group:
        check_logprobs(models["qwen2"], Driver(group, 1).run(different, MAX_TOKENS, sampling))


def generate(worker: Any, seed: int = 1) -> list[list[int]]:
    requests: list[Request] = Driver(worker, seed).run(prompts(), MAX_TOKENS, SAMPLING)
    assert all(request.failure is None for request in requests)
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What one rank generates."""
    return {arch: generate(start_worker(path)) for arch, path in models.items()}


@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ranks_together_generate_what_one_rank_does(
    arch: str,
    sizes: tuple[int, int],
    processes: RankProcesses,
    models: dict[str, Path],
    expected: dict[str, list[list[int]]],
) -> None:
    with processes.group(models[arch], *sizes) as group:
        assert generate(group) == expected[arch]


@pytest.mark.parametrize(
    ("arch", "tp", "pp", "changes"),
    [
        ("llama", 1, 3, {}),
        ("qwen3", 1, 3, {}),
        ("llama", 2, 1, {"attention_bias": True, "mlp_bias": True}),
        ("llama", 2, 1, {"vocab_size": 511}),
        ("llama", 4, 1, {"num_key_value_heads": 4, "vocab_size": 509}),
        ("llama", 2, 2, {"num_key_value_heads": 4, "num_hidden_layers": 2}),
        ("llama", 1, 2, {"model_type": "granite", "rope_parameters": None, "embedding_multiplier": 12.0}),
        ("qwen3", 2, 1, {"model_type": "phi3", "rope_parameters": None, "tie_word_embeddings": False}),
        ("qwen3", 2, 1, {"model_type": "olmo2", "tie_word_embeddings": False}),
        ("llama", 2, 1, {"rope_parameters": DYNAMIC_ROPE}),
        ("llama", 2, 2, {"rope_parameters": LONG_ROPE}),
        ("gpt_oss", 1, 2, {}),
        ("llama", 2, 2, {"model_type": "granite_swa", "rope_parameters": None, "sliding_window": 24}),
        ("llama", 2, 1, MIMO),
        ("llama", 1, 2, {**MIMO, "num_hidden_layers": 4}),
        ("qwen3", 1, 2, EXPERTS),
        ("qwen3", 2, 1, EXPERTS),
        ("qwen3", 2, 2, {**EXPERTS, "mlp_only_layers": [1]}),
        ("qwen3", 4, 1, {**EXPERTS, "num_key_value_heads": 4}),
        ("mistral", 2, 1, {"model_type": "mixtral", "num_local_experts": 4}),
        ("mistral", 2, 2, {"model_type": "mixtral", "num_local_experts": 4}),
        ("qwen2", 1, 2, WINDOWS_AT_THE_END),
        ("qwen2", 2, 2, WINDOWS_AT_THE_END),
    ],
    ids=[
        *("three stages", "three stages, tied", "biases", "odd vocabulary", "four ranks of a stage", "one layer each"),
        "input scaled before the layers",
        *(
            "outputs gathered, inputs split",
            "norm over all heads",
            "dynamic rope",
            "long rope",
            "sinks in stages",
            "sinks divided",
            "sinks in some layers, divided",
            "sinks in some layers, in stages",
            "experts converted while loading",
        ),
        *("experts divided", "experts in some layers", "experts over four ranks", "mixtral", "mixtral in stages"),
        *("a stage with layers of one kind", "ranks of a stage with layers of one kind"),
    ],
)
def test_models_of_other_shapes(
    arch: str, tp: int, pp: int, changes: dict[str, Any], processes: RankProcesses, tmp_path: Path
) -> None:
    make_model(arch, tmp_path, **changes)
    with processes.group(tmp_path, tp, pp) as group:
        assert generate(group) == generate(start_worker(tmp_path))


def test_a_tied_head_is_found_under_either_name(
    processes: RankProcesses, models: dict[str, Path], expected: dict
) -> None:
    path = models["qwen3"]
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    renamed = path / "renamed"
    renamed.mkdir()
    (renamed / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, renamed / "model.safetensors", metadata={"format": "pt"})
    with processes.group(renamed, 2, 2) as group:
        assert generate(group) == expected["qwen3"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(tp: int, processes: RankProcesses, tmp_path: Path) -> None:
    """Batch-invariant. gloo's own sum of four ranks depends on the number of rows."""
    make_model("qwen2", tmp_path, num_key_value_heads=4)
    options: dict[str, Any] = {"batch_invariant": True, "dtype": "bfloat16", "block_size": 16}
    scored = structs.replace(GREEDY, logprobs=5)

    def run(seed: int, given: list[list[int]]) -> list[tuple[list[int], list[bytes]]]:
        with processes.group(tmp_path, tp, **options) as group:
            requests = Driver(group, seed).run(given, MAX_TOKENS, [scored] * len(given))
            return [(request.output, request.records) for request in requests]

    together = run(1, prompts())
    assert run(2, prompts()) == together
    for index in (2, 3):
        assert run(3, [prompts()[index]]) == [together[index]]


def sums_and_rings(rank: Rank) -> tuple[list[list[float]], int]:
    """Sum the numbers of the ranks, in tensors of three sizes. Return the sums, and how many were made by a ring."""
    assert rank._peers is not None
    most = MOST_GATHERED_BYTES // 4
    tensors = [torch.full((size,), rank._rank + 1.0) for size in (1, most, most + 1)]
    with pytest.MonkeyPatch.context() as patch:
        rings, all_reduce = list[Tensor](), dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda one, **options: (all_reduce(one, **options), rings.append(one)))  # type: ignore[func-returns-value]
        return [rank._peers.all_reduce(tensor).unique().tolist() for tensor in tensors], len(rings)


@pytest.mark.parametrize("tp", [2, 4])
def test_small_tensors_of_many_ranks_are_gathered(tp: int, processes: RankProcesses, tmp_path: Path) -> None:
    make_model("llama", tmp_path, num_key_value_heads=4)
    with processes.group(tmp_path, tp) as group:
        total = [tp * (tp + 1) / 2]
        assert group.call("inspect", sums_and_rings) == [([total] * 3, 1 if tp > 2 else 3)] * tp


def test_bfloat16_is_exchanged_as_it_is(processes: RankProcesses, tmp_path: Path) -> None:
    build_model("llama").bfloat16().save_pretrained(tmp_path)
    with processes.group(tmp_path, 2, 2) as group:
        assert all(len(output) == MAX_TOKENS for output in generate(group))


# --- what each rank holds ---


def shapes(rank: Rank) -> dict[str, list[int]]:
    """Shapes of the parameters by name, those of packed weights as they were before."""
    found = {name: list(parameter.shape) for name, parameter in rank._model.module.named_parameters()}
    for name, module in rank._model.module.named_modules():
        packed = getattr(vars(module).get("forward"), "__self__", None)
        if isinstance(packed, PackedLinear):
            found[f"{name}.weight"] = [packed.num_outputs, packed.num_inputs]
    return found


def unpacked_linear_layers(rank: Rank) -> list[str]:
    linears = {name: module for name, module in rank._model.module.named_modules() if hasattr(module, "in_features")}
    assert len(linears) > 3
    return [name for name, module in linears.items() if "forward" not in vars(module)]


@pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")
def test_divided_layers_are_packed(processes: RankProcesses, models: dict[str, Path]) -> None:
    with processes.group(models["llama"], 2, 2, attention="reference") as group:
        assert group.call("inspect", unpacked_linear_layers) == [[]] * 4


def blocks_that_are_summed(rank: Rank) -> int | None:
    """How many blocks of the fused forward pass are divided; None without one."""
    decoder = rank._model.decoder
    if decoder is None:
        return None
    return sum((layer.attention.divided is not None) + (layer.divided_mlp is not None) for layer in decoder.layers)


@pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("arch", CONFIGS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ranks_run_the_fused_forward_pass(
    arch: str, sizes: tuple[int, int], processes: RankProcesses, models: dict[str, Path]
) -> None:
    with processes.group(models[arch], *sizes) as group:
        counts = group.call("inspect", blocks_that_are_summed)
    assert None not in counts
    assert sum(counts) == (4 * build_model(arch).config.num_hidden_layers if sizes[0] == 2 else 0)


@pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")
def test_ranks_that_compute_in_other_ways_are_refused(processes: RankProcesses, models: dict[str, Path]) -> None:
    with processes.group(models["llama"], 2, 1) as group:
        group.call("inspect", drop_decoder_of_the_last_rank)
        with pytest.raises(RankFailed, match="only some ranks") as failed:
            group.call("initialize_cache", 8, 0)
    assert failed.value.kind == "ConfigError"


def drop_decoder_of_the_last_rank(rank: Rank) -> None:
    if rank._topology.tp_rank == rank._topology.tp_size - 1:
        rank._model.decoder = None


def test_each_rank_holds_its_part_of_the_weights(processes: RankProcesses, models: dict[str, Path]) -> None:
    whole = start_worker(models["llama"])
    whole_bytes = whole._model.facts.weight_bytes
    with processes.group(models["llama"], 2, 2, attention="reference") as group:
        first, _, last, _ = group.call("inspect", shapes)
        held = [facts.weight_bytes for facts in group.facts]
        assert sum(held) < 1.01 * whole_bytes
        assert held[0] == held[1] < 0.4 * whole_bytes
        assert held[2] == held[3] < 0.3 * whole_bytes
        assert [facts.kv_bytes_per_block for facts in group.facts] == [
            whole._model.facts.kv_bytes_per_block * num_layers // (3 * 2) for num_layers in (2, 2, 1, 1)
        ]
    assert first["model.embed_tokens.own.weight"] == last["lm_head.weight"] == [VOCAB_SIZE // 2, 64]
    assert first["model.layers.0.self_attn.k_proj.weight"] == last["model.layers.2.self_attn.k_proj.weight"] == [16, 64]
    assert first["model.layers.1.mlp.down_proj.own.weight"] == [64, 64]
    assert not any(name.startswith(("lm_head", "model.norm", "model.layers.2")) for name in first)
    assert not any(name.startswith(("model.embed", "model.layers.0", "model.layers.1")) for name in last)


def listening_addresses(rank: Rank) -> set[str]:
    """Addresses on which sockets of this process listen, in hexadecimal."""
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    tables = (Path(f"/proc/self/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {each[1].split(":")[0] for each in sockets if each[3] == LISTENS and f"socket:[{each[9]}]" in own}


def test_ranks_on_one_host_do_not_listen_to_the_network(processes: RankProcesses, models: dict[str, Path]) -> None:
    with processes.group(models["llama"], 2, 2) as group:
        assert set().union(*group.call("inspect", listening_addresses)) == {"0100007F"}


# --- steps ---


def step(step_id: int, rows: list[StepRow], num_decodes: int = 0, **changes: Any) -> StepPlan:
    """`num_decodes`: the decode rows that go on. All rows yield a token."""
    num_tokens = num_decodes + sum(row.num_tokens for row in rows)
    return StepPlan(StepId(step_id), 1, 2, num_tokens, num_decodes + len(rows), rows, **changes)


def prefill(seq_id: int, count: int = len(PROMPT)) -> StepRow:
    return StepRow(SeqId(seq_id), 0, count, [3 * seq_id + 1, 3 * seq_id + 2, 3 * seq_id + 3])


def new(seq_id: int, tokens: list[int]) -> NewSequence:
    return NewSequence(SeqId(seq_id), tokens, len(tokens), GREEDY)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (2, 2)], ids=["TP 2", "PP 3", "TP 2 x PP 2"])
def test_plans_may_come_before_the_results_of_earlier_ones(
    sizes: tuple[int, int], processes: RankProcesses, models: dict[str, Path]
) -> None:
    others = [10, 20, 30, 40, 50]
    expected = [
        Driver(start_worker(models["llama"]), 1, preempts=False).run([p], 5)[0].output for p in (PROMPT, others)
    ]
    plans = [
        step(1, [prefill(0)], new=[new(0, PROMPT)]),
        step(2, [prefill(1)], new=[new(1, others)], micro_batch=1),
    ]
    plans += [step(3 + number, [], num_decodes=1, micro_batch=number % 2) for number in range(8)]
    plans.append(step(11, [], finished=[0, 1]))
    with processes.group(models["llama"], *sizes) as group:
        for plan in plans:
            group.launch(plan)
        results = [group.collect() for _ in plans]
        assert [result.step_id for result in results] == list(range(1, 12))
        assert [result.token_ids[0] for result in results[0:10:2]] == expected[0]
        assert [result.token_ids[0] for result in results[1:10:2]] == expected[1]
        assert set(group.call("inspect", num_sequences)) == {0}


def copy_late(rank: Rank) -> None:
    """Let results come to the host as those of a GPU do: wrong until an event is synchronized."""
    device, runner = DeviceDouble(), rank.runner
    assert runner is not None

    def to_host(tensor: Tensor) -> Tensor:
        device.copies.append((torch.full_like(tensor, WRONG_VALUE), tensor.clone()))
        return device.copies[-1][0]

    pytest.MonkeyPatch().setattr(runner_module, "to_host", to_host)  # until the process ends
    runner._record_event = lambda: DeviceEvent(device)  # type: ignore[assignment,method-assign,return-value]


def test_the_last_stage_of_gpus_sends_ids_that_are_on_the_host(
    models: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    with (
        contextlib.closing(RankProcesses(4)) as processes,
        processes.group(models["llama"], 2, 2) as group,
    ):
        group.call("inspect", copy_late)
        assert generate(group) == expected["llama"]


def poison(rank: Rank) -> None:
    """Set the embedding of the last id of the vocabulary to NaN, on the rank that holds it."""
    embedding = rank._model.module.model.embed_tokens
    weight = getattr(getattr(embedding, "own", embedding), "weight", None)
    if weight is not None and rank._topology.tp_rank == rank._topology.tp_size - 1:
        weight[-1] = float("nan")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_row_without_finite_logits_fails_alone_on_all_ranks(
    sizes: tuple[int, int], processes: RankProcesses, models: dict[str, Path]
) -> None:
    healthy = Driver(start_worker(models["llama"]), 1, preempts=False).run([PROMPT], 3)[0].output
    poisoned = [1, 2, VOCAB_SIZE - 1, 3, 4]
    with processes.group(models["llama"], *sizes) as group:
        group.call("inspect", poison)
        group.launch(step(1, [prefill(0), prefill(1)], new=[new(0, PROMPT), new(1, poisoned)]))
        group.launch(step(2, [], num_decodes=2))  # sent before step 1 fails
        for position in range(2):
            result = group.collect()
            assert result.token_ids == [healthy[position], NO_TOKEN]
            assert [(failure.seq_id, failure.kind) for failure in result.failures] == [(1, "nan_logits")]
        result = execute(group, step(3, [prefill(1)], num_decodes=1, finished=[1], new=[new(1, PROMPT)]))
        assert (result.token_ids, result.failures) == ([healthy[2], healthy[0]], [])


def count_masked_steps(rank: Rank) -> None:
    assert rank.runner is not None and rank.runner.decoder is not None
    decoder: Any = rank.runner.decoder
    argmax, decoder.num_masked = decoder.argmax, 0

    def count(hidden: Tensor, masks: RowMasks | None = None) -> tuple[Tensor, Tensor]:
        decoder.num_masked += masks is not None
        found: tuple[Tensor, Tensor] = argmax(hidden, masks)
        return found

    decoder.argmax = count


def num_masked_steps(rank: Rank) -> int:
    decoder: Any = rank.runner.decoder  # type: ignore[union-attr]
    count: int = decoder.num_masked
    return count


@pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_head_takes_the_masks_of_grammars_where_one_rank_has_all_of_it(
    sizes: tuple[int, int], processes: RankProcesses, models: dict[str, Path], tmp_path: Path
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>").save_pretrained(tmp_path)
    options: dict[str, Any] = {"tokenizer": str(tmp_path), "eos_token_ids": [0]}
    sampling = [GREEDY, structs.replace(GREEDY, grammar=GRAMMAR), structs.replace(GREEDY, grammar=GRAMMAR)]
    given = [[number, 2, 3] for number in range(len(sampling))]

    def outputs(worker: Any) -> list[list[int]]:
        return [request.output for request in Driver(worker, 1).run(given, 20, sampling)]

    expected = outputs(start_worker(models["llama"], **options))
    with processes.group(models["llama"], *sizes, **options) as group:
        group.call("inspect", count_masked_steps)
        assert outputs(group) == expected
        counts = group.call("inspect", num_masked_steps)
    tp, pp = sizes
    assert [count > 0 for count in counts] == [tp == 1 and rank == pp - 1 for rank in range(tp * pp)]


def test_a_step_in_which_nothing_is_drawn(processes: RankProcesses, models: dict[str, Path]) -> None:
    chunk = StepRow(SeqId(0), 0, 3, [1, 2])
    with processes.group(models["llama"], 2, 2) as group:
        assert execute(group, step(1, [chunk], new=[new(0, PROMPT)])).token_ids == []
        assert execute(group, step(2, [])).token_ids == []
        rest = execute(group, step(3, [StepRow(SeqId(0), 3, 2, [])])).token_ids
        assert rest == Driver(start_worker(models["llama"]), 1, preempts=False).run([PROMPT], 1)[0].output


# --- sleep ---


def num_tensors_held(rank: Rank) -> int:
    """Tensors of the last step that sends, and receives between stages, still hold."""
    assert rank._peers is not None
    stage_input = find_stage_input(rank._model.module) if rank._model.location != "disk" else None
    return len(rank._peers._sends) + (stage_input is not None and stage_input.received is not None)


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_wake_up_as_they_were(
    level: int, processes: RankProcesses, models: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    with processes.group(models["gemma3_text"], 2, 2) as group:
        row = StepRow(
            SeqId(0), 0, len(PROMPT), list(range(1, 7))
        )  # two columns of blocks for the three groups of layers
        execute(group, step(1, [row], new=[new(0, PROMPT)]))
        assert sum(group.call("inspect", num_tensors_held)) > 0
        group.call("sleep", level)
        assert group.call("inspect", num_tensors_held) == [0, 0, 0, 0]
        assert set(group.call("inspect", pool_bytes)) == {0}
        with pytest.raises(RankFailed, match="it sleeps"):
            group.call("launch", step(2, []))
        group.call("wake_up", ["weights", "kv_cache"], 1)
        assert generate(group) == expected["gemma3_text"]
