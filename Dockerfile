# One image for every role: `serve` (the engine), `gateway rq`, and the client verbs.
#
#   docker build .                                                                        for NVIDIA GPUs
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .           for CPUs: several GB smaller
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build

RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# Elsewhere the compiled kernels are optional; an image must have them.
RUN python -m zipfile --list /wheels/millrace-*.whl | grep --quiet "millrace/worker/kernels/_library"
# What the wheel needs, without the wheel: this file stays the same, and with it a layer, while only our code changes.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *p['optional-dependencies']['engine'], sep='\n')" > /wheels/requirements.txt


FROM python:${PYTHON}-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
# Kernels that Triton has compiled. A volume here keeps them for the next container.
ENV TRITON_CACHE_DIR=/home/millrace/.cache/triton
ARG TORCH_INDEX=https://pypi.org/simple
# The compiled kernels need libgomp1; not every build of torch brings it under this name. On GPUs Triton compiles at run time.
RUN case "${TORCH_INDEX}" in */cpu) compiler="" ;; *) compiler="gcc libc6-dev" ;; esac \
    && apt-get update && apt-get install --yes --no-install-recommends libgomp1 ${compiler} && rm -rf /var/lib/apt/lists/*

# The layers from the largest, which changes least often, to the smallest: torch, the other packages, our code.
COPY constraints.txt /tmp/
RUN pip install --constraint /tmp/constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY --from=build /wheels/requirements.txt /tmp/
RUN pip install --constraint /tmp/constraints.txt --requirement /tmp/requirements.txt
COPY --chmod=755 deploy/hold-if-invalid.sh /usr/local/bin/hold-if-invalid
RUN useradd --create-home --uid 10001 millrace \
    && install -d -o millrace -g millrace /models /home/millrace/.cache /home/millrace/.cache/huggingface "${TRITON_CACHE_DIR}" \
    && install -d -m 1777 /run/millrace-devices
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-deps /wheels/millrace-*.whl

USER millrace
WORKDIR /home/millrace
STOPSIGNAL SIGTERM
# No HEALTHCHECK: it depends on the role. docker-compose.yml has one for each.
ENTRYPOINT ["millrace"]
CMD ["--help"]
