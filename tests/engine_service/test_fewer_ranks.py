"""A service whose engine holds less than it did when its job was admitted."""

from __future__ import annotations

import redis

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.jobs import Arrived, ServedJob
from millrace.engine_service.serving.output import Output
from millrace.engine_service.serving.service import Service
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import WorkerConfig
from millrace.results.connection import connect
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer
from tests.engine_service.core.sequences import make_sequence
from tests.results.engines import FINGERPRINT, submit
from tests.results.engines import Engine as EngineByHand
from tests.results.invariants import check_queue


def test_a_job_that_fits_no_more_goes_back_and_waits_for_a_larger_engine(
    redis_url: str, queue_name: str, redis_client: redis.Redis
) -> None:
    queue = JobQueue(connect(redis_url), queue_name)
    submit(queue, "large")
    by_hand = EngineByHand(queue)
    claimed = by_hand.claim_one()
    config = WorkerConfig(model="", num_blocks=64, block_size=4)
    engine = Engine(
        UniprocExecutor(config, worker_module="tests.executor.stub"),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    engine.start()
    engine.scheduler.replace_pool(BlockPool(8, KVLayout(4)))  # as when ranks do not come back
    writer, capacity = Writer(queue, on_stale=print), Capacity(8, 28)
    capacity.open(claimed.cost, is_alone=False)
    output = Output(writer.put, FINGERPRINT)
    service = Service(engine, capacity, output, writer, is_held=bool, on_over=print, on_sleep_change=print)
    generation = Generation(make_sequence(1, 5, 100), TextRules(is_text_wanted=False), tokenizer=None)
    service.post(Arrived(ServedJob(claimed, [generation], due_s=0.0)))
    service._process_events()
    service._step()
    assert writer.close()
    engine.shutdown()
    job = queue.get("large")
    assert (job.state, job.attempt) == ("delayed", 0)
    assert capacity.wait_for_budget(0.0) is not None
    check_queue(redis_client, queue_name)
