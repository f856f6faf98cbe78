# syntax=docker/dockerfile:1
# Two images of the same program: `docker build --target gpu .` trains, `docker build --target cpu .` loads for it.
#
# What changes rarely lies below what changes often: torch, then the other libraries, then this package. A change to the
# source builds one small layer again. Compilers and pip's cache stay behind in the stages that need them.
#
# `base` of nvidia/cuda is the CUDA runtime and what asks the NVIDIA container toolkit for the driver. cuDNN, cuBLAS and
# NCCL come with the torch wheel, in the versions it was built with: `runtime` has them a second time, 2 GB of it. Code of
# yours that links to the system's takes it: --build-arg CUDA_FLAVOUR=runtime.
ARG CUDA_VERSION=13.0.1
ARG CUDA_FLAVOUR=base
ARG PYTHON_VERSION=3.12

# ---- the wheel of this package ----------------------------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheels .

# ---- its libraries, with torch for CUDA -------------------------------------------------------------------------------
FROM nvidia/cuda:${CUDA_VERSION}-${CUDA_FLAVOUR}-ubuntu24.04 AS gpu-libraries
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt /build/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-compile --constraint /build/constraints.txt torch
COPY pyproject.toml docker/requirements.py /build/
ARG EXTRAS=plots,tensorboard,files,feed,accelerate
RUN --mount=type=cache,target=/root/.cache/pip python /build/requirements.py /build/pyproject.toml "$EXTRAS" \
    | pip install --no-compile --constraint /build/constraints.txt --requirement /dev/stdin

# ---- the same with torch for CPUs -------------------------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu-libraries
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt /build/
# Wheels without CUDA, a tenth of the size. They are in an index of their own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-compile --constraint /build/constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml docker/requirements.py /build/
ARG EXTRAS=plots,tensorboard,files,feed
RUN --mount=type=cache,target=/root/.cache/pip python /build/requirements.py /build/pyproject.toml "$EXTRAS" \
    | pip install --no-compile --constraint /build/constraints.txt --requirement /dev/stdin

# ---- loaders, TensorBoard, training on CPUs ---------------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
ARG UID=1000
RUN useradd --uid "$UID" --create-home dtrain \
    && install --directory --owner=dtrain /workspace /workspace/runs /workspace/reports
COPY --from=cpu-libraries /opt/venv /opt/venv
COPY docker/health.py /opt/health.py
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/venv/bin/pip install --no-cache-dir --no-deps --no-compile /wheels/*.whl
COPY configs /workspace/configs
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /workspace
USER ${UID}
ENTRYPOINT ["dtrain"]
CMD ["--help"]

# ---- training on NVIDIA GPUs: the last stage is what `docker build .` makes -------------------------------------------
FROM nvidia/cuda:${CUDA_VERSION}-${CUDA_FLAVOUR}-ubuntu24.04 AS gpu
ARG UID=1000
# gcc and Python's headers are for torch.compile, whose Triton compiles a small launcher for each kernel.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && useradd --uid "$UID" --create-home dtrain \
    && install --directory --owner=dtrain /workspace /workspace/runs /workspace/reports
COPY --from=gpu-libraries /opt/venv /opt/venv
COPY docker/health.py /opt/health.py
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/venv/bin/pip install --no-cache-dir --no-deps --no-compile /wheels/*.whl
COPY configs /workspace/configs
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
USER ${UID}
ENTRYPOINT ["dtrain"]
CMD ["--help"]
