"""llama.cpp's server with a slot for each of up to 256 requests, by HTTP on the loopback, with float16 KV, its default."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engines import runner
from benchmarks.models import HOME
from benchmarks.workloads import Request, Workload

SERVER = HOME / "llamacpp" / "build" / "bin" / "llama-server"
MAX_SLOTS = 256


class LlamaServer(runner.Engine):
    def __init__(self, path: Path, workload: Workload) -> None:
        num_slots = min(len(workload.requests), MAX_SLOTS)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        command = [str(SERVER), "--model", str(HOME / "gguf" / f"{path.name}.gguf"), "--port", str(port)]
        command += ["--threads", threads, "--parallel", str(num_slots), "--no-kv-unified", "--cache-ram", "0"]
        command += ["--ctx-size", str(num_slots * workload.max_model_len), "--batch-size", "2048"]
        self._port, self._server = port, subprocess.Popen(command)
        while not self._is_ready():
            if self._server.poll() is not None:
                raise SystemExit(f"llama-server has ended with status {self._server.returncode}")
            time.sleep(0.01)
        self._threads = ThreadPoolExecutor(MAX_SLOTS)

    def _is_ready(self) -> bool:
        try:
            return self._call("GET", "/health").get("status") == "ok"
        except ConnectionError:
            return False

    def generate(self, requests: Sequence[Request]) -> list[int]:
        return list(self._threads.map(self._complete, requests))

    def facts(self) -> runner.Figures:
        (sources,) = (HOME / "llamacpp").glob("llama_cpp_python-*.tar.gz")
        return {"versions": {"llama-cpp-python": sources.name.removesuffix(".tar.gz").partition("-")[2]}}

    def _complete(self, request: Request) -> int:
        asked = {"prompt": request.prompt, "n_predict": request.num_output, "ignore_eos": True}
        greedy = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
        return int(self._call("POST", "/completion", json.dumps(asked | greedy))["tokens_predicted"])

    def _call(self, method: str, path: str, body: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply: dict[str, Any] = json.load(connection.getresponse())
        connection.close()
        return reply


if __name__ == "__main__":
    runner.run(LlamaServer)
