"""How sure a model is of each token that it writes, and what it would have written instead.

python examples/logprobs.py "3 + 4 =" --redis redis://localhost:6379/0
"""

from __future__ import annotations

import argparse
import math

from millrace import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--redis", help="default: $MILLRACE_REDIS_URL")
    parser.add_argument("--queue", default="default")
    args = parser.parse_args()
    with Client(args.redis, queue=args.queue) as client:
        job_id = client.submit(prompt=args.prompt, temperature=0, max_tokens=16, logprobs=3)
        job = client.wait(job_id, timeout_s=300)
    if job.error is not None:
        raise SystemExit(f"job {job.id} failed: {job.error.message}")
    for token in job.outputs[0].logprobs or []:
        # The first entry is the token of the text; the others are the most likely ones.
        print("   ".join(f"{one.decoded_token!r} {math.exp(one.logprob):.1%}" for one in token.values()))


if __name__ == "__main__":
    main()
