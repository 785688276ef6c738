# One image for every role: `serve` (the engine), `gateway rq`, and the client verbs.
FROM python:3.12-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/millrace
WORKDIR /src

# The largest layer first; it is built anew only when the pins change.
COPY constraints.txt ./
RUN /opt/millrace/bin/pip install --constraint constraints.txt torch

COPY . .
RUN /opt/millrace/bin/pip install --constraint constraints.txt '.[engine,gateway]'
# Elsewhere the compiled kernels are optional; an image must have them.
RUN ls /opt/millrace/lib/python*/site-packages/millrace/worker/kernels/_library*.so


FROM python:3.12-slim

# The compiled kernels need it; not every build of torch brings it under this name.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 millrace \
    && install -d -o millrace -g millrace /models /home/millrace/.cache/huggingface
COPY --from=build /opt/millrace /opt/millrace

ENV PATH=/opt/millrace/bin:$PATH PYTHONUNBUFFERED=1
USER millrace
WORKDIR /home/millrace
STOPSIGNAL SIGTERM

# An engine that lives has a heartbeat in Redis. A model may take minutes to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["millrace", "stats", "--min-engines", "1"]

ENTRYPOINT ["millrace"]
CMD ["--help"]
