"""The names and meanings of the Prometheus metrics, and where their values come from.

Metrics with a meaning that vLLM has too have its names, with `millrace_` for `vllm:`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from millrace.engine_service.engine import Engine, EngineMetrics
from millrace.engine_service.observe.health import Health
from millrace.engine_service.serving.job_table import JobMetrics
from millrace.engine_service.serving.leases import Leases
from millrace.engine_service.serving.service import Service
from millrace.executor.histogram import Histogram
from millrace.executor.metrics import ExecutorMetrics
from millrace.results.counts import QueueStats
from millrace.results.messages import TERMINAL_STATES


class MetricsCollector(Collector):
    """Reads the current figures for each scrape, without blocking. Figures that do not exist yet are left out."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._service: Service | None = None
        self._leases: Leases | None = None
        self._names: dict[str, str] = {}

    def watch(self, service: Service, leases: Leases, **names: str) -> None:
        """Add the figures of the service and of its queue. `names` are the labels of the metric `millrace_engine`."""
        self._service, self._leases = service, leases
        self._names = names

    def collect(self) -> Iterator[Metric]:
        yield _gauge("healthy", "1 while /health answers 200, else 0.", self._health.unhealthy_reason() is None)
        if self._engine.is_started:
            metrics = self._engine.metrics()
            yield from _engine(metrics)
            yield from _executor(metrics.executor)
            yield from _workers(metrics.executor)
        if self._service is not None:
            yield InfoMetricFamily("millrace_engine", "The engine and what it serves.", self._names)
            yield from _jobs(self._service.metrics())
            yield _gauge(
                "unwritten_bytes", "Results that wait to be written to Redis, about.", self._service.unwritten_bytes
            )
        if self._leases is not None:
            outage = "For how long a thread of this engine has not been able to use Redis, 0 while all are."
            yield _gauge("redis_outage_seconds", outage, self._leases.outage_s)
        if self._leases is not None and (stats := self._leases.queue_stats) is not None:
            yield from _queue(stats, self._names["queue"])


def _queue(stats: QueueStats, queue: str) -> Iterator[Metric]:
    """All engines of a queue report the same, as of their last heartbeat."""
    for name, meaning, value in (
        ("queue_inbox_jobs", "Entries of the inbox that no engine has accepted or rejected yet.", stats.inbox),
        ("queue_ready_jobs", "Jobs that wait for an engine.", stats.queued),
        ("queue_delayed_jobs", "Jobs that wait for a time: delayed ones and retries.", stats.delayed),
        ("queue_running_jobs", "Jobs that engines hold.", stats.running),
        ("queue_tokens", "Expected tokens of the ready and the delayed jobs.", stats.waiting_tokens),
        ("queue_oldest_job_seconds", "Age of the oldest ready job, 0 without one.", stats.oldest_queued_ms / 1000),
        ("queue_engines", "Engines with a heartbeat.", stats.engines),
        ("queue_paused", "1 while the queue is paused, else 0.", stats.is_paused),
    ):
        family = GaugeMetricFamily(f"millrace_{name}", meaning, labels=["queue"])
        family.add_metric([queue], value)
        yield family
    meaning = "Jobs of the queue that ended, on an engine or without one, by the state in which they ended."
    ended = CounterMetricFamily("millrace_queue_ended", meaning, labels=["queue", "state"])
    for state in sorted(TERMINAL_STATES):
        ended.add_metric([queue, state], getattr(stats, state))
    yield ended
    meaning = "Entries of the inbox that could not become a job."
    rejected = CounterMetricFamily("millrace_queue_rejected", meaning, labels=["queue"])
    rejected.add_metric([queue], stats.rejected)
    yield rejected


def _jobs(metrics: JobMetrics) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "millrace_jobs",
        "Jobs that left this engine: ended, given back to the queue (released), or lost to another engine. "
        "Counted before the result is in Redis.",
        labels=["outcome"],
    )
    for outcome, number in metrics.num_by_outcome.items():
        ended.add_metric([outcome], number)
    yield ended
    yield _gauge("jobs_open", "Jobs that this engine holds now.", metrics.num_open)
    yield _counter(
        "prompt_tokens", "Prompt tokens of the jobs whose first token was sampled.", metrics.num_prompt_tokens
    )
    for name, meaning, of in (
        ("request_queue_time_seconds", "From when a job could run until an engine had it.", metrics.queue_s),
        ("time_to_first_token_seconds", "From when a job could run to its first token.", metrics.first_token_s),
        ("e2e_request_latency_seconds", "From when a job could run until it had finished.", metrics.end_to_end_s),
        ("request_prompt_tokens", "Prompt tokens of a finished job.", metrics.prompt_tokens),
        ("request_generation_tokens", "Output tokens of a finished job, of all candidates.", metrics.output_tokens),
    ):
        yield _histogram(name, meaning, of)


def _engine(metrics: EngineMetrics) -> Iterator[Metric]:
    scheduler, executor = metrics.scheduler, metrics.executor
    yield _gauge("sleep_level", "0: awake, 1: asleep, weights in host memory, 2: without them.", metrics.sleep_level)
    yield _gauge("num_requests_running", "Sequences in the batch.", scheduler.num_running)
    yield _gauge("num_requests_waiting", "Sequences that wait for space in the batch.", scheduler.num_waiting)
    yield _counter("num_preemptions", "Sequences preempted because KV blocks ran out.", scheduler.num_preemptions)
    yield _counter("prefix_cache_queries", "Known tokens of the sequences admitted.", scheduler.pool.num_queried_tokens)
    yield _counter("prefix_cache_hits", "Of those, found in the prefix cache.", scheduler.pool.num_hit_tokens)
    yield _counter(
        "prefix_cache_stored_blocks", "KV blocks that a prompt could find from then on.", scheduler.pool.num_stored
    )
    yield _counter("prefix_cache_removed_blocks", "Of those, evicted or dropped.", scheduler.pool.num_removed)
    yield _counter("prefix_cache_resets", "Times that the prefix cache was reset.", scheduler.pool.num_cleared)
    yield _gauge(
        "host_tier_blocks", "Size of the host tier in KV blocks, 0 without one.", scheduler.pool.num_host_blocks
    )
    yield _gauge("host_tier_cached_blocks", "Blocks that the host tier keeps.", scheduler.pool.num_host_cached)
    yield _counter("swapped_out_blocks", "KV blocks copied to the host tier.", scheduler.pool.num_swapped_out)
    yield _counter("swapped_in_blocks", "KV blocks copied back from the host tier.", scheduler.pool.num_swapped_in)
    yield _gauge("kv_pool_blocks", "Size of the KV pool in blocks.", executor.num_blocks)
    yield _gauge("kv_cache_usage_perc", "Share of the KV pool's blocks that sequences hold, 0 to 1.", metrics.pool_use)
    interval = "From one token of a sequence to the next."
    yield _histogram("inter_token_latency_seconds", interval, metrics.inter_token_s)
    budget = "Most tokens in a step; less than configured after the device ran out of memory."
    yield _gauge("step_budget_tokens", budget, metrics.token_budget)


def _executor(metrics: ExecutorMetrics) -> Iterator[Metric]:
    yield _counter("generation_tokens", "Tokens sampled; its rate is the throughput.", metrics.num_tokens)
    yield _counter("executor_steps", "Steps sent to the workers.", metrics.num_steps)
    yield _counter("executor_requests", "Steps and calls sent to the workers.", metrics.num_requests)
    yield _counter("executor_requests_completed", "Of those, answered with a result.", metrics.num_completed)
    yield _counter("executor_requests_failed", "Of those, answered with an error or not at all.", metrics.num_failed)
    yield _counter("executor_plan_bytes", "Payload of all step plans.", metrics.plan_bytes)
    yield _counter("executor_reply_bytes", "Payload of all replies to steps.", metrics.reply_bytes)
    yield _counter("executor_stale_replies", "Late replies, and foreign messages.", metrics.num_stale_replies)
    yield _counter("executor_device_seconds", "Time in which the device computed steps.", metrics.device_s)
    latency = "From the sending of a step or call to its last needed reply."
    yield _histogram("executor_latency_seconds", latency, metrics.latency_s)
    yield _histogram("step_seconds", "Duration of a step, with sending and reply.", metrics.step_s)
    idle = "From the reply of a step to the sending of the next: workers idle."
    yield _histogram("host_seconds", idle, metrics.host_s)
    yield _histogram("rpc_seconds", "Transfer of a step to the worker and back, without computation.", metrics.rpc_s)


def _workers(metrics: ExecutorMetrics) -> Iterator[Metric]:
    yield _gauge("workers_active", "Workers that run.", metrics.num_active_workers)
    yield _gauge("ranks", "Ranks over which the model is divided now.", metrics.world_size)
    yield _gauge("ranks_wanted", "Ranks over which it should be divided.", metrics.wanted_world_size)
    yield _counter("worker_failures", "Losses of workers, for any reason.", metrics.num_failed_workers)
    yield _counter("worker_restarts", "Times that the workers were replaced.", metrics.num_restarts)
    recovery = "Duration of the last replacement of the workers, from the notice of their loss; 0 before the first."
    yield _gauge("worker_recovery_seconds", recovery, metrics.recovery_s)
    yield _gauge("kv_pool_epoch", "Number of the KV pool: grows when workers start, restart or wake.", metrics.epoch)
    yield _by_rank("device_memory_bytes", "Device memory that a rank holds.", metrics.device_bytes)
    yield _by_rank("device_memory_total_bytes", "Total memory of a rank's device.", metrics.device_total_bytes)
    utilization = "Share of the time that a rank's device computes, 0 to 1."
    yield _by_rank("device_utilization_ratio", utilization, metrics.device_utilization)


def _counter(name: str, meaning: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"millrace_{name}", meaning, value)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"millrace_{name}", meaning, value)


def _by_rank(name: str, meaning: str, values: Sequence[float | None]) -> GaugeMetricFamily:
    """Leave out the ranks that do not know the value."""
    family = GaugeMetricFamily(f"millrace_{name}", meaning, labels=["rank"])
    for rank, value in enumerate(values):
        if value is not None:
            family.add_metric([str(rank)], value)
    return family


def _histogram(name: str, meaning: str, of: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, map(float, of.bounds)), "+Inf"]
    buckets = list(zip(bounds, accumulate(of.counts), strict=True))
    return HistogramMetricFamily(f"millrace_{name}", meaning, buckets=buckets, sum_value=of.total)
