"""The names and meanings of the Prometheus metrics, and where their values come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from millrace.engine_service.engine import Engine, EngineMetrics
from millrace.engine_service.observe.health import Health
from millrace.engine_service.serving.job_table import JobMetrics
from millrace.engine_service.serving.service import Service
from millrace.executor.metrics import ExecutorMetrics, Percentiles

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily | SummaryMetricFamily


class MetricsCollector(Collector):
    """Reads the current figures for each scrape, without blocking. Figures that do not exist yet are left out."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._service: Service | None = None
        self._names: dict[str, str] = {}

    def watch(self, service: Service, **names: str) -> None:
        """Add the figures of the service. `names` are the labels of the metric `millrace_engine`."""
        self._service = service
        self._names = names

    def collect(self) -> Iterator[Family]:
        yield _gauge("healthy", "1 while /health answers 200, else 0.", self._health.unhealthy_reason() is None)
        if self._engine.is_started:
            metrics = self._engine.metrics()
            yield from _engine(metrics)
            yield from _executor(metrics.executor)
            yield from _workers(metrics.executor)
        if self._service is not None:
            yield InfoMetricFamily("millrace_engine", "The engine and what it serves.", self._names)
            yield from _jobs(self._service.metrics())


def _jobs(metrics: JobMetrics) -> Iterator[Family]:
    ended = CounterMetricFamily(
        "millrace_jobs",
        "Jobs that left this engine: ended, given back to the queue (released), or lost to another engine.",
        labels=["outcome"],
    )
    for outcome, number in metrics.num_by_outcome.items():
        ended.add_metric([outcome], number)
    yield ended
    yield _gauge("jobs_open", "Jobs that this engine holds now.", metrics.num_open)
    yield _summary("job_seconds", "From a job's arrival in this engine to when it left.", metrics.job_s)


def _engine(metrics: EngineMetrics) -> Iterator[Family]:
    scheduler, executor = metrics.scheduler, metrics.executor
    yield _gauge("sleep_level", "0: awake, 1: asleep, weights in host memory, 2: without them.", metrics.sleep_level)
    yield _gauge("sequences_running", "Sequences in the batch.", scheduler.num_running)
    yield _gauge("sequences_waiting", "Sequences that wait for space in the batch.", scheduler.num_waiting)
    yield _counter("preemptions", "Sequences preempted because KV blocks ran out.", scheduler.num_preemptions)
    yield _counter("prefix_cache_queries", "Known tokens of the sequences admitted.", scheduler.pool.num_queried_tokens)
    yield _counter("prefix_cache_hits", "Of those, found in the prefix cache.", scheduler.pool.num_hit_tokens)
    yield _gauge(
        "host_tier_blocks", "Size of the host tier in KV blocks, 0 without one.", scheduler.pool.num_host_blocks
    )
    yield _gauge("host_tier_cached_blocks", "Blocks that the host tier keeps.", scheduler.pool.num_host_cached)
    yield _counter("swapped_out_blocks", "KV blocks copied to the host tier.", scheduler.pool.num_swapped_out)
    yield _counter("swapped_in_blocks", "KV blocks copied back from the host tier.", scheduler.pool.num_swapped_in)
    yield _gauge("kv_pool_blocks", "Size of the KV pool in blocks.", executor.num_blocks)
    yield _gauge("kv_pool_used_ratio", "Share of the KV pool's blocks that sequences hold, 0 to 1.", metrics.pool_use)
    budget = "Most tokens in a step; less than configured after the device ran out of memory."
    yield _gauge("step_budget_tokens", budget, metrics.token_budget)


def _executor(metrics: ExecutorMetrics) -> Iterator[Family]:
    yield _counter("generated_tokens", "Tokens sampled; its rate is the throughput.", metrics.num_tokens)
    yield _counter("executor_steps", "Steps sent to the workers.", metrics.num_steps)
    yield _counter("executor_requests", "Steps and calls sent to the workers.", metrics.num_requests)
    yield _counter("executor_requests_completed", "Of those, answered with a result.", metrics.num_completed)
    yield _counter("executor_requests_failed", "Of those, answered with an error or not at all.", metrics.num_failed)
    yield _counter("executor_plan_bytes", "Payload of all step plans.", metrics.plan_bytes)
    yield _counter("executor_reply_bytes", "Payload of all replies to steps.", metrics.reply_bytes)
    yield _counter("executor_stale_replies", "Late replies, and foreign messages.", metrics.num_stale_replies)
    latency = "From the sending of a step or call to its last needed reply."
    yield _summary("executor_latency_seconds", latency, metrics.latency_s)
    yield _summary("step_seconds", "Duration of a step, with sending and reply.", metrics.step_s)
    yield _summary("host_seconds", "From the reply of a step to the sending of the next: workers idle.", metrics.host_s)
    yield _summary("rpc_seconds", "Transfer of a step to the worker and back, without computation.", metrics.rpc_s)


def _workers(metrics: ExecutorMetrics) -> Iterator[Family]:
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


def _summary(name: str, meaning: str, of: Percentiles) -> SummaryMetricFamily:
    """The quantiles are of the last samples, count and sum of all."""
    family = SummaryMetricFamily(f"millrace_{name}", meaning, count_value=of.count, sum_value=of.sum_s)
    for quantile, value in (("0.5", of.p50), ("0.95", of.p95), ("0.99", of.p99)):
        family.add_sample(family.name, {"quantile": quantile}, value if of.count else float("nan"))
    return family
