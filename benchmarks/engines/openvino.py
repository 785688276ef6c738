"""OpenVINO GenAI's continuous batching on the CPU: paged attention and prefix caching, greedy."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engines import runner
from benchmarks.models import HOME
from benchmarks.workloads import Workload

CACHE_GIB = 4


class OpenVINO(runner.Engine):
    packages = ("openvino", "openvino-genai")

    def __init__(self, path: Path, workload: Workload, kv: str = "") -> None:
        """`kv`: precision of the KV cache; empty for OpenVINO's own choice, which is u8."""
        import openvino_genai as genai

        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GIB
        scheduling.max_num_seqs = 256
        scheduling.max_num_batched_tokens = 2048
        scheduling.enable_prefix_caching = True
        scheduling.dynamic_split_fuse = True
        # Without the hint OpenVINO computes in bfloat16 where the machine has it, float32 workloads too.
        properties = {"INFERENCE_PRECISION_HINT": "f32"} if workload.dtype == "float32" else {}
        if kv:
            properties["KV_CACHE_PRECISION"] = kv
        exported = HOME / "openvino" / path.name
        self._pipeline = genai.ContinuousBatchingPipeline(str(exported), scheduling, "CPU", properties)

    def generate(self, workload: Workload) -> list[int]:
        import numpy
        import openvino
        import openvino_genai as genai

        prompts = [openvino.Tensor(numpy.array([one.prompt], dtype=numpy.int64)) for one in workload.requests]
        configs = [
            genai.GenerationConfig(max_new_tokens=one.num_output, do_sample=False, ignore_eos=True)
            for one in workload.requests
        ]
        return [len(result.m_generation_ids[0]) for result in self._pipeline.generate(prompts, configs)]


if __name__ == "__main__":
    runner.run(OpenVINO)
