# An image whose entry is `make train`: docker build -t xla-zoo . && docker run --shm-size 8g xla-zoo MODEL=dlrm
# On GKE: docs/tpu.md. Nothing secret goes in: .dockerignore lets only the files of the trainer through; tokens come at
# the start, as variables.

# Debian 12, whose own Python is 3.11. tests/test_image.py builds on one that mmdebstrap has made.
ARG BASE=docker.io/library/debian:bookworm-slim
FROM ${BASE}

# libpython: torch_xla loads it, and Debian's interpreter does without.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates libpython3.11 libtcmalloc-minimal4 make python3.11-venv \
    && rm -rf /var/lib/apt/lists/*

# Dependencies, in a layer of their own: a change of the code below does not install them again. In a build there is no
# chip by which make could tell that libtpu is needed, so it is told. LIBTPU= leaves it out; without chips the image
# trains on the CPU. LIBTPU_VERSION= chooses another one than the pinned: docs/tpu.md.
WORKDIR /xla-zoo
ARG LIBTPU=yes
ARG LIBTPU_VERSION
ARG PIP_EXTRA_INDEX_URL
COPY Makefile requirements.txt requirements-torchrec.txt requirements-tpu.txt requirements-wandb.txt ./
COPY tpu/libpython.py tpu/
RUN export PIP_NO_CACHE_DIR=1 && make install .venv/.wandb PYTHON=python3.11 CHIPS="$LIBTPU" \
        ${LIBTPU_VERSION:+LIBTPU_VERSION="$LIBTPU_VERSION"}

# A checkout's files may be younger than a cached layer's stamp, and equal: without `touch` every start would install.
COPY . .
RUN touch .venv/.installed .venv/.wandb && useradd --create-home --uid 1000 zoo && install --directory --owner=zoo runs

# Large allocations of the loaders stay with the process, rather than going back to the system and coming as new pages.
ENV LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 \
    TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD=107374182400 \
    PYTHONUNBUFFERED=1
# Root where the chips ask for it: --build-arg RUN_AS=root.
ARG RUN_AS=zoo
USER ${RUN_AS}
ENTRYPOINT ["python3.11", "-m", "tpu.entry"]
