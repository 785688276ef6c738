"""The process of the engine service: build, connect, loop, close."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from prometheus_client import CollectorRegistry, ProcessCollector

from millrace.engine_service.build import build_engine
from millrace.engine_service.chat.output_format import output_format
from millrace.engine_service.chat.outputs import ChatOutputs
from millrace.engine_service.chat.renderer import ProcessRenderer
from millrace.engine_service.config import ServeConfig, parse
from millrace.engine_service.engine import Engine
from millrace.engine_service.errors import ConfigurationError, EngineDead
from millrace.engine_service.model_files import eos_token_ids, fingerprint, resolve_model
from millrace.engine_service.observe.endpoint import Endpoint
from millrace.engine_service.observe.health import Health
from millrace.engine_service.observe.metrics import MetricsCollector
from millrace.engine_service.observe.status import StatusLog
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.inbox import Inbox
from millrace.engine_service.serving.intake import Intake
from millrace.engine_service.serving.jobs import Lost
from millrace.engine_service.serving.leases import Leases, new_engine_id
from millrace.engine_service.serving.output import Output
from millrace.engine_service.serving.prefixes import CachedPrefixes
from millrace.engine_service.serving.service import Service
from millrace.engine_service.text import Tokenizer
from millrace.executor.heap import release_freed_memory
from millrace.executor.launch.devices import lock_free_gpus
from millrace.executor.launch.external import become_rank, die_with_rank_0, is_torchrun_rank
from millrace.executor.logs import FORMAT_VARIABLE, set_up_logs
from millrace.executor.phases import process_age_s, timed
from millrace.executor.wire.failures import EXIT_CONFIGURATION, EXIT_DEVICE_LOST, EXIT_OUT_OF_MEMORY
from millrace.results.connection import connect
from millrace.results.errors import QueueError
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer

logger = logging.getLogger("millrace.engine")

EXIT_REDIS = 4
EXIT_WORKERS_LOST = 6

_EXIT_BY_CAUSE = {"device_lost": EXIT_DEVICE_LOST, "out_of_memory": EXIT_OUT_OF_MEMORY}

_FLUSH_S = 10.0
_GC_THRESHOLD = 50_000
"""New objects until a collection. With Python's 700, 1 MB of JSON with 300,000 lists is parsed in 3 times the time, and all
threads wait for each collection."""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status."""
    try:
        signal.signal(signal.SIGTERM, _stop_starting)
        signal.signal(signal.SIGINT, _stop_starting)
        config = parse(argv)
        os.environ[FORMAT_VARIABLE] = config.log_format
        set_up_logs(config.log_level)
        logger.info("start: imports and options %.2f s", process_age_s())
        if config.executor in ("auto", "external") and is_torchrun_rank(os.environ):
            _become_rank(config, sys.argv[1:] if argv is None else argv)
        return _Process(config).run()
    except (ConfigurationError, QueueError, EngineDead) as error:
        if os.environ.get(FORMAT_VARIABLE) == "json":
            logger.critical("%s", error)
        else:
            print(f"millrace serve: {error}", file=sys.stderr)
        if isinstance(error, EngineDead):
            return _EXIT_BY_CAUSE.get(error.cause, EXIT_WORKERS_LOST)
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_REDIS


def _become_rank(config: ServeConfig, arguments: list[str]) -> NoReturn:
    """Turn this process, which torchrun started, into a rank. Rank 0 starts the service."""
    world_size, stages = int(os.environ["WORLD_SIZE"]), config.pipeline_parallel_size
    if config.tensor_parallel_size not in (1, world_size // stages) or world_size % stages:
        raise ConfigurationError(
            f"tensor_parallel_size x pipeline_parallel_size: must be torchrun's {world_size} processes, "
            f"got {config.tensor_parallel_size} x {stages}"
        )
    chosen = ["--executor", "external", "--tensor-parallel-size", str(world_size // stages)]
    command = [sys.executable, "-P", "-m", "millrace.engine_service", *arguments, *chosen]
    try:
        become_rank(command, log_level=config.log_level)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _stop_starting(number: int, frame: FrameType | None) -> None:
    """Handle a signal before there is anything to drain: exit, but run the cleanup."""
    raise SystemExit(0)


class _Process:
    """Owns the parts of one engine service."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._path = resolve_model(config.model)
        self._tokenizer_path = Path(config.tokenizer).expanduser() if config.tokenizer else self._path
        self._engine = build_engine(config, self._path, is_service=True, log_level=config.log_level)
        self._health = Health(self._engine)
        self._metrics_collector = MetricsCollector(self._engine, self._health)
        self._endpoint: Endpoint | None = None
        self._renderer: ProcessRenderer | None = None
        self._admission: Admission | None = None

    def run(self) -> int:
        try:
            service = self._start()
            gc.freeze()  # as in a rank
            gc.set_threshold(_GC_THRESHOLD)
            is_all_written = self._serve(service)
        finally:
            self._engine.shutdown()
            if self._renderer is not None:
                self._renderer.close()
            if self._admission is not None:
                self._admission.close()
            if self._endpoint is not None:
                self._endpoint.close()
        logger.info("done")
        return 0 if is_all_written else EXIT_REDIS

    def _start(self) -> Admission:
        """Start the workers, and meanwhile load the tokenizer and open the connections."""
        for warning in self._connect().check_server():
            logger.warning("redis: %s", warning)
        self._endpoint = self._open_endpoint()
        self._choose_devices()
        self._engine.begin_start()
        with timed(logger, "tokenizer"):
            tokenizer = Tokenizer(self._tokenizer_path)
        self._renderer = ProcessRenderer(tokenizer.chat_template)
        with timed(logger, "workers"):
            facts = self._engine.start()
        die_with_rank_0()
        config, template = self._config, tokenizer.chat_template
        form = output_format(template, config.tool_call_parser, config.reasoning_parser)
        logger.info(
            "chats: tool calls are read as %s, reasoning as %s", form.tool_calls or "none", form.reasoning or "none"
        )
        self._admission = Admission(
            facts,
            tokenizer,
            eos_token_ids(self._path),
            config.max_logprobs,
            renderer=self._renderer,
            chat_outputs=ChatOutputs(form, tokenizer),
        )
        return self._admission

    def _choose_devices(self) -> None:
        config = self._config
        if config.device != "auto" or not self._engine.has_local_ranks:
            return
        try:
            lock_free_gpus(config.tensor_parallel_size * config.pipeline_parallel_size, Path(config.device_locks))
        except ValueError as error:
            raise ConfigurationError(str(error)) from error

    def _serve(self, admission: Admission) -> bool:
        """Serve until a signal. Return whether Redis has taken every write."""
        config = self._config
        facts = self._engine.facts
        mark = fingerprint(self._path, self._tokenizer_path, f"{facts.dtype} {facts.kv_cache_dtype}")
        serving = _Serving(config, self._engine, self._health, admission, mark, self._connect)
        serving.start()
        engine_id = serving.leases.engine_id
        names = {"engine": engine_id, "model": config.model_name, "queue": config.queue}
        self._metrics_collector.watch(serving.service, serving.leases, **names)
        logger.info("engine %s serves %s on queue %s", engine_id, config.model_name, config.queue)
        release_freed_memory()  # what the tokenizer's file took, mostly
        logger.info("start: ready after %.2f s", process_age_s())
        try:
            serving.run()
        finally:  # also when the workers are lost for good: running jobs go back to the queue
            is_all_written = serving.close()
        return is_all_written

    def _open_endpoint(self) -> Endpoint | None:
        if self._config.metrics_port is None:
            return None
        registry = CollectorRegistry()
        registry.register(self._metrics_collector)
        ProcessCollector(registry=registry)
        return Endpoint(self._config.metrics_host, self._config.metrics_port, registry, self._health)

    def _connect(self) -> JobQueue:
        """Return a new connection; each thread has its own."""
        return JobQueue(connect(self._config.redis), self._config.queue)


class _Serving:
    """Owns what connects a started engine with its queue."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        health: Health,
        admission: Admission,
        mark: str,
        connect: Callable[[], JobQueue],
    ) -> None:
        """`mark` is the engine's fingerprint."""
        self._config = config
        self._engine = engine
        self._health = health
        outage = Outage()
        self._writer = Writer(
            connect(), on_stale=lambda job_id, lease: self.service.post(Lost(job_id, lease)), outage=outage
        )
        self.leases = Leases(
            connect(),
            new_engine_id(),
            config.heartbeat,
            pending=self._writer.pending,
            on_news=lambda news: self.service.post_reconciliation(news),
            sleep_level=lambda: engine.sleep_level,
            outage=outage,
        )
        capacity = Capacity(_max_open_jobs(config), engine.scheduler.pool.capacity_tokens)
        prefixes = CachedPrefixes(lambda block_hash: engine.scheduler.pool.cache.contains(block_hash))
        self.service = Service(
            engine,
            capacity,
            Output(self._writer.put, mark),
            self._writer,
            prefixes=prefixes if config.enable_prefix_caching else None,
            on_over=self.leases.drop,
            on_sleep_change=self.leases.beat_soon,
        )
        self._intake = Intake(
            connect,
            self.leases,
            capacity,
            admission,
            model_name=config.model_name,
            fingerprint=mark,
            post=self.service.post,
            cached_prompts=prefixes.current,
            outage=outage,
        )
        self._inbox = Inbox(connect(), outage)
        self._status_log = StatusLog(engine.metrics, self.service.metrics)

    def start(self) -> None:
        self.leases.start()
        _drain_on_signal(self.service, self._engine)
        self._intake.start()
        self._inbox.start()
        threads = [*self._intake.threads, self._inbox.thread, self.leases.thread, *self._writer.threads]
        self._health.watch(self.leases, threads)
        self._status_log.start()

    def run(self) -> None:
        """Serve until a signal, then finish the running jobs."""
        try:
            self.service.serve()
            logger.info("draining: no jobs are claimed any more")
            self._stop_intake()
            self.service.finish_running(self._config.drain_grace)
        except KeyboardInterrupt:  # by `_drain_on_signal`
            logger.info("draining, without the workers")

    def close(self) -> bool:
        """Return the running jobs to the queue. Return whether Redis has taken every write."""
        self._stop_intake()
        self.service.release_all()
        is_all_written = self._writer.close(_FLUSH_S)
        if not is_all_written:
            logger.error("Redis did not take the last writes; another engine will recover their jobs")
        self.leases.stop()
        self._status_log.stop()
        return is_all_written

    def _stop_intake(self) -> None:
        self._health.let_threads_end()
        self._inbox.stop()
        self._intake.stop()


def _max_open_jobs(config: ServeConfig) -> int:
    """Return a few more jobs than can run, so that the next step can use a place that becomes free."""
    return config.max_num_seqs + max(4, config.max_num_seqs // 4)


def _drain_on_signal(service: Service, engine: Engine) -> None:
    def drain(number: int, frame: FrameType | None) -> None:
        service.drain()
        if engine.is_restarting_workers:  # no job can finish before they are back, which may take long
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
