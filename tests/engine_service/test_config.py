"""Every wrong option of `millrace serve` is refused in one line that names it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine_service.config import EngineConfig, ServeConfig, checked, make_parser, parse
from millrace.engine_service.errors import ConfigurationError, EngineDead
from millrace.engine_service.model_files import resolve_model

OPTIONS = [field.name for field in msgspec.structs.fields(ServeConfig)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--queue", "a b"), r"queue: must match .*, got 'a b'"),
        (("--queue", "\udcff"), r"queue: must match "),
        (("--block-size", "many"), r"argument --block-size: must be an integer, got 'many'; see millrace serve --help"),
        (
            ("--max-model-len", "32k"),
            r"argument --max-model-len: must be an integer, got '32k'; see millrace serve --help",
        ),
        (("--block-size", "9" * 5000), r"argument --block-size: .*; see millrace serve --help"),
        (("--block-size", "70000"), r"block_size: must be 1 to 65536, got 70000"),
        (("--num-blocks", "1"), r"num_blocks: must be 2 to 2147483647, got 1"),
        (("--max-model-len", str(2**64)), r"max_model_len: must be 2 to "),
        (("--colour", "red"), r"unrecognized arguments: --colour red; see millrace serve --help"),
        (("--max-num-seq", "5"), r"unrecognized arguments: --max-num-seq 5; did you mean --max-num-seqs\?; see "),
        (("--max_model_len=5",), r"unrecognized arguments: .*; did you mean --max-model-len\?; see "),
        (("--enable-prefix-caching",), r"unrecognized arguments: --enable-prefix-caching; see "),
        (("--data-parallel-size", "2"), r"unrecognized arguments: --data-parallel-size 2: start that many engines; "),
        (("-c", "4096"), r"unrecognized arguments: -c 4096: use --max-model-len; see "),
        (("--num_ctx=5",), r"unrecognized arguments: --num_ctx=5: use --max-model-len; see "),
        (
            ("--threads", "2"),
            r"unrecognized arguments: --threads 2: set the environment variable OMP_NUM_THREADS; see ",
        ),
        (("-ngl", "99"), r"unrecognized arguments: -ngl 99: all layers are on the device; use --device; see "),
        (
            ("--guided-decoding-backend", "x"),
            r"unrecognized arguments: --guided-decoding-backend x: Millrace has one, llguidance; leave it out; see ",
        ),
        (("--port", "80"), r"unrecognized arguments: --port 80: an engine .* has no HTTP API \(docs/web\.md\); see "),
        (("org/name", "-x"), r"unrecognized arguments: org/name -x; did you mean --model org/name\?; see "),
        (("--heartbeat", "nan"), r"heartbeat: must be 0\.2 to 604800, got nan"),
        (("--heartbeat", "inf"), r"heartbeat: must be "),
        (("--drain-grace", "-1"), r"drain_grace: must be 0 to "),
        (("--metrics-port", "65536"), r"metrics_port: must be 0 to 65535, got 65536"),
        (("--metrics-host", "0.0.0.0"), r"metrics_host: has no effect without metrics_port; add --metrics-port PORT$"),
        (("--kv-cache-memory", "lots"), r"kv_cache_memory: must be .* such as 512M or 4GiB, got 'lots'"),
        (("--kv-cache-memory", "9" * 400), r"kv_cache_memory: must be "),
        (("--kv-cache-memory", "9999999999Gi"), r"kv_cache_memory: must be "),
        (("--swap-space-gib", "-1"), r"swap_space_gib: must be 0 to 1048576, got -1"),
        (
            ("--swap-space-gib", "4GiB"),
            r"argument --swap-space-gib: must be a number, got '4GiB'; see millrace serve --help",
        ),
        (("--device", "gpu"), r"device: must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (("--tokenizer", "a\nb"), r"tokenizer: must be printable text of 1 to 4096 characters"),
        (("--redis", "redis://:secret\n@x"), r"redis: must be printable text of 1 to 4096 characters$"),
        (
            ("--config", "/nowhere/engine.toml"),
            r"config: must be a readable TOML file, got '/nowhere/.*No such",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_of_serve_that_cannot_be_is_one_sentence(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        parse(["--model", "m", *options])


HOSTILE = st.text(max_size=20) | st.sampled_from(["x" * 9000, "9" * 5000, "\udcff" * 3000, "-1", "nan"])


@given(st.sampled_from(OPTIONS), HOSTILE)
def test_whatever_an_option_is_given_the_error_is_one_short_printable_line(name: str, value: str) -> None:
    option = "--" + name.replace("_", "-")
    error = error_of(["--model=m", f"{option}={value}"])
    assert error is None or name in error or option in error
    assert error is None or (error.isprintable() and len(error) < 500)


def error_of(arguments: list[str]) -> str | None:
    try:
        parse(arguments)
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seqs = 4", r"config: has an unknown option 'max-num-seqs'; did you mean max_num_seqs\?"),
        ('"a\\nb" = 1', r"config: has an unknown option 'a\\nb'; "),
        (
            "no_prefix_caching = true",
            r"config: has an unknown option .*; for --no-prefix-caching write enable_prefix_caching = false$",
        ),
        (
            "no_run_ahead = true",
            r"config: has an unknown option 'no_run_ahead'; for --no-run-ahead write run_ahead = false$",
        ),
        ("enforce-eager = true", r"config: has an unknown option .*; for --enforce-eager write enforce_eager = true$"),
        ("metrics_host = '0.0.0.0'", r"metrics_host: has no effect without metrics_port; add --metrics-port PORT$"),
        ("dtype = 'int8'", r"dtype: must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ("kv_cache_dtype = 'int8'", r"kv_cache_dtype: must be one of auto, float32, bfloat16, fp8, got 'int8'"),
        ("attention = 'flash'", r"attention: must be one of auto, cpu, triton, reference, got 'flash'"),
        ("executor = 'threads'", r"executor: must be one of .*, got 'threads'"),
        ("log_level = 'LOUD'", r"log_level: must be one of .*, got 'LOUD'"),
        ("max_num_seqs = '4'", r"max_num_seqs: expected `int`, got `str`"),
        ("max_num_seqs = ", r"config: must be a readable TOML file, got '.*engine.toml': "),
    ],
)
def test_a_config_file_that_cannot_be_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (file := tmp_path / "engine.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        parse(["--model", "m", "--config", str(file)])


def test_a_metrics_host_needs_a_port_from_the_command_line_or_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "engine.toml").write_text("metrics_host = '0.0.0.0'\n")
    assert parse(["--model", "m", "--config", str(file), "--metrics-port", "0"]).metrics_port == 0
    assert parse(["--model", "m", "--metrics-host", "127.0.0.1"]).metrics_port is None


def test_the_command_line_goes_before_the_config_file_and_that_before_the_defaults(tmp_path: Path) -> None:
    (file := tmp_path / "engine.toml").write_text("model = '/models/a'\nmax_num_seqs = 4\nheartbeat = 5\nqueue = 'b'\n")
    config = parse(["--config", str(file), "--queue", "c", "--kv-cache-memory", "1.5 GiB"])
    assert (config.queue, config.max_num_seqs, config.heartbeat, config.block_size) == ("c", 4, 5.0, 16)
    assert config.for_worker(tmp_path).kv_cache_memory_bytes == 3 * 2**29


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["org/model"], {"model", "org/model"}),
        (["/models/a/"], {"a", "/models/a/"}),
        (["org/model", "--served-model-name", "b"], {"b"}),
    ],
)
def test_jobs_may_name_the_model_as_the_command_line_did_or_by_its_last_part(
    options: list[str], names: set[str]
) -> None:
    assert set(parse(["--model", *options]).model_names) == names


def test_the_help_names_what_an_option_can_be() -> None:
    text = make_parser().format_help()
    assert "--attention {auto,cpu,triton,reference}" in text
    servers = re.findall(r"\$\w+", text.partition("--redis URL ")[2])
    assert servers == ["$MILLRACE_REDIS_URL", "$MILLRACE_REDIS_URL_FILE", "$REDIS_URL"]
    assert "--kv-cache-dtype {auto,float32,bfloat16,fp8}" in text


def test_a_relative_tokenizer_is_found_by_ranks_with_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, path in [("tok", tmp_path / "tok"), ("~/tok", tmp_path / "home" / "tok")]:
        assert EngineConfig(model="m", tokenizer=name).for_worker(tmp_path).tokenizer == str(path)
    assert EngineConfig(model="m").for_worker(tmp_path).tokenizer is None


def test_the_host_tier_is_given_in_gib(tmp_path: Path) -> None:
    config = parse(["--model", "m", "--swap-space-gib", "1.5"]).for_worker(tmp_path)
    assert (config.swap_space_bytes, config.force_swap) == (3 * 2**29, False)


@pytest.mark.parametrize("model", ["x" * 4000, "~nobody-of-this-name/x", "/nowhere", "./x", "a\tb"])
def test_a_model_that_is_nowhere_is_one_sentence(model: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^model: ") as caught:
        resolve_model(checked({"model": model}, EngineConfig).model)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_a_revision_is_of_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(model: str, *, revision: str | None, **_: object) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = parse(["--model", "org/name", "--revision", "5c38ec7"])
    assert resolve_model(config.model, config.revision) == resolve_model("org/name") == tmp_path
    assert asked == [("org/name", "5c38ec7"), ("org/name", None)]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"^revision: is of a hub id, and .* is a directory; leave it out$"):
        resolve_model(str(tmp_path), "5c38ec7")


def test_an_error_of_an_engine_keeps_the_beginning_and_the_end_of_a_long_text() -> None:
    error = EngineDead("first\n" + "line\n" * 500 + "\x1b[0m last", cause="device_lost")
    assert str(error).startswith("first line line ") and str(error).endswith(r" line \x1b[0m last")
    assert str(error).isprintable() and len(str(error)) < 500
    assert error.cause == "device_lost"
