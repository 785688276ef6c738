"""The process of the engine service: build, connect, loop, close."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, ProcessCollector

from millrace import __version__
from millrace.engine_service.chat.output_format import describe, output_format
from millrace.engine_service.chat.outputs import ChatOutputs
from millrace.engine_service.chat.renderer import ProcessRenderer
from millrace.engine_service.config import ServeConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.errors import EngineDead, EngineError
from millrace.engine_service.model_files import eos_token_ids, fingerprint
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
from millrace.executor.base import Executor
from millrace.executor.heap import release_freed_memory
from millrace.executor.launch.external import die_with_rank_0
from millrace.executor.model_names import unlisted_models
from millrace.executor.phases import process_age_s, timed
from millrace.executor.wire.messages import ModelFacts
from millrace.results.connection import connect
from millrace.results.errors import QueueError
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer

logger = logging.getLogger("millrace.engine")

_FLUSH_S, _BUILD_S = 10.0, 60.0
"""At the end: for Redis to take the last writes, and before it for this process to build large ones."""
_GC_THRESHOLD = 50_000
"""New objects until a collection. With Python's 700, 1 MB of JSON with 300,000 lists is parsed in 3 times the time, and all
threads wait for each collection."""
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may compute while others wait. A job passes through several threads: with Python's 5 ms, each of them
waits so long for the thread that parses a large body."""


def run(config: ServeConfig, path: Path, executor: Executor, must_stop: Callable[[], bool]) -> bool:
    """Serve the model in `path` until SIGTERM or SIGINT. The workers of the executor may have begun to start. `must_stop`:
    whether such a signal has come already. Return whether Redis has taken every write. Raises `ConfigurationError`,
    `QueueError` and `EngineDead`."""
    return _Process(config, path, executor).run(must_stop)


class _Process:
    """Owns the parts of one engine service."""

    def __init__(self, config: ServeConfig, path: Path, executor: Executor) -> None:
        self._config = config
        self._path = path
        self._tokenizer_path = config.tokenizer_path or path
        self._engine = Engine(executor, config.for_scheduler())
        self._health = Health(self._engine)
        self._metrics_collector = MetricsCollector(self._engine, self._health)
        self._endpoint: Endpoint | None = None
        self._renderer: ProcessRenderer | None = None
        self._admission: Admission | None = None
        self._model_fingerprint: str
        """From `_start` on."""

    def run(self, must_stop: Callable[[], bool]) -> bool:
        """See `run` of this module."""
        try:
            admission = self._start()
            if must_stop():
                return True
            gc.freeze()  # as in a rank
            gc.set_threshold(_GC_THRESHOLD)
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            gc.enable()
            is_all_written = self._serve(admission)
        finally:
            self._engine.shutdown()
            if self._renderer is not None:
                self._renderer.close()
            if self._admission is not None:
                self._admission.close()
            if self._endpoint is not None:
                self._endpoint.close()
        logger.info("done")
        return is_all_written

    def _start(self) -> Admission:
        """Load the tokenizer and open the connections while the workers start."""
        queue = self._connect()
        for warning in queue.check_server():
            logger.warning("redis: %s", warning)
        logger.info("redis: %s", queue.server)
        self._endpoint = self._open_endpoint()
        files = self._fingerprint()
        with timed(logger, "tokenizer"):
            with unlisted_models():
                from transformers import PreTrainedTokenizerFast  # noqa: F401, the first import, which lists them
            tokenizer = Tokenizer(self._tokenizer_path, self._config.chat_template)
        self._renderer = ProcessRenderer(tokenizer.chat_template)
        with timed(logger, "workers"):
            facts = self._engine.start()
        die_with_rank_0()
        if self._fingerprint() != files:  # it may be that of other weights than the workers have
            raise EngineDead(f"model: the files in {self._path} changed while they were read; start the engine again")
        config, template = self._config, tokenizer.chat_template
        self._model_fingerprint = full_fingerprint(files, facts, config.quantization)
        form = output_format(template, config.tool_call_parser, config.reasoning_parser)
        logger.info("%s", describe(form, template))
        self._admission = Admission(
            facts,
            tokenizer,
            eos_token_ids(self._path, self._config.adapter),
            config.max_logprobs,
            renderer=self._renderer,
            chat_outputs=ChatOutputs(form, tokenizer),
        )
        return self._admission

    def _fingerprint(self) -> str:
        return fingerprint(self._path, self._tokenizer_path, self._config.chat_template, self._config.adapter)

    def _serve(self, admission: Admission) -> bool:
        """Serve until `_Serving.run` returns. Return whether Redis has taken every write."""
        config = self._config
        serving = _Serving(config, self._engine, self._health, admission, self._model_fingerprint, self._connect)
        serving.start()
        engine_id = serving.leases.engine_id
        names = {"engine": engine_id, "model": config.model_names[0], "queue": config.queue, "version": __version__}
        self._metrics_collector.watch(serving.service, serving.leases, **names)
        logger.info("engine %s serves %s on queue %s", engine_id, config.model_names[0], config.queue)
        release_freed_memory()  # what the tokenizer's file took, mostly
        logger.info("start: ready after %.2f s", process_age_s())
        releases = True
        try:
            serving.run()
        except (EngineError, QueueError):  # such as workers that are lost for good: another engine may go on at once
            raise
        except Exception:
            logger.error("the engine has a bug: its jobs go back to the queue when its heartbeat expires")
            releases = False
            raise
        finally:
            is_all_written = serving.close(releases=releases)
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
        model_fingerprint: str,
        connect: Callable[[], JobQueue],
    ) -> None:
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
            model=config.model_names[0],
            outage=outage,
        )
        capacity = Capacity(_max_open_jobs(config), engine.scheduler.pool.capacity_tokens)
        prefixes = CachedPrefixes(lambda block_hash: engine.scheduler.pool.cache.contains(block_hash))
        self.service = Service(
            engine,
            capacity,
            Output(self._writer.put, model_fingerprint),
            self._writer,
            prefixes=prefixes if config.enable_prefix_caching else None,
            is_held=self.leases.holds,
            on_over=self.leases.drop,
            on_sleep_change=self.leases.beat_soon,
        )
        self._intake = Intake(
            connect,
            self.leases,
            capacity,
            admission,
            model_names=config.model_names,
            fingerprint=model_fingerprint,
            isolates_tenants=config.isolate_tenants,
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
        """Serve until a signal, or until the engine is idle for too long. Then finish the running jobs."""
        try:
            self.service.serve(self._config.exit_when_idle)
            logger.info("draining: the engine claims no more jobs")
            self._stop_intake()
            self.service.finish_running(self._config.drain_grace)
        except KeyboardInterrupt:  # by `_drain_on_signal`
            logger.info("draining: the workers are not available, so running jobs go back to the queue")

    def close(self, *, releases: bool) -> bool:
        """Stop, and return the running jobs to the queue. Without `releases` leave them to `recover`, which counts a crash
        of each: one that no engine survives ends at last. Return whether Redis has taken every write."""
        self._stop_intake()
        if releases:
            self.service.release_all()
        is_all_written = self._writer.close(_FLUSH_S, build_timeout_s=_BUILD_S)
        if not is_all_written:
            logger.error("Redis did not take the last writes; another engine will recover their jobs")
        self.leases.stop(deregisters=releases and is_all_written)  # else it would only wait for Redis again
        self._status_log.stop()
        return is_all_written

    def _stop_intake(self) -> None:
        self._health.let_threads_end()
        self._inbox.stop()
        self._intake.stop()


def full_fingerprint(files: str, facts: ModelFacts, quantization: str | None) -> str:
    """Return what two engines have in common that continue each other's jobs. `files`: the fingerprint of the model's and
    tokenizer's files."""
    choices = quantization, facts.rope
    return "-".join((files, facts.dtype, facts.kv_cache_dtype, *filter(None, choices)))


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
