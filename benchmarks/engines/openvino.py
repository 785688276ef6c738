"""OpenVINO GenAI's continuous batching on the CPU: paged attention and prefix caching, greedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines import runner
from benchmarks.models import HOME
from benchmarks.workloads import Request, Workload

CACHE_GIB = 4


class OpenVINO(runner.Engine):
    packages = ("openvino", "openvino-genai")

    def __init__(self, path: Path, workload: Workload, is_kv_quantized: bool) -> None:
        """`is_kv_quantized`: keep OpenVINO's own choice for the KV cache, 8 bits. Else it has the computation's dtype."""
        import openvino
        import openvino_genai as genai

        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GIB
        scheduling.max_num_seqs = 256
        scheduling.max_num_batched_tokens = 2048
        scheduling.enable_prefix_caching = True
        scheduling.dynamic_split_fuse = True
        # OpenVINO prefers bfloat16 where the machine has it, for float32 workloads too.
        preferred = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        precision = "f32" if workload.dtype == "float32" else preferred
        properties = {"INFERENCE_PRECISION_HINT": precision}
        if not is_kv_quantized:
            properties["KV_CACHE_PRECISION"] = precision
        exported = HOME / "openvino" / path.name
        self._pipeline = genai.ContinuousBatchingPipeline(str(exported), scheduling, "CPU", properties)

    def generate(self, requests: Sequence[Request]) -> list[int]:
        import numpy
        import openvino
        import openvino_genai as genai

        prompts = [openvino.Tensor(numpy.array([request.prompt], dtype=numpy.int64)) for request in requests]
        greedy = {"do_sample": False, "ignore_eos": True}
        configs = [genai.GenerationConfig(max_new_tokens=request.num_output, **greedy) for request in requests]
        return [len(result.m_generation_ids[0]) for result in self._pipeline.generate(prompts, configs)]


if __name__ == "__main__":
    runner.run(OpenVINO)
