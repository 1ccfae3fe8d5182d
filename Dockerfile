# mkdir -p data runs && docker build -t paddock .
# docker run --rm -it --gpus all --ipc host --user "$(id -u):$(id -g)" -v "$PWD/data:/paddock/data" -v "$PWD/runs:/paddock/runs" paddock
FROM python:3.12-slim AS base
# torch.compile needs a C++ compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-c"]
WORKDIR /paddock
COPY requirements*.txt ./
COPY scripts/setup.sh scripts/environment.py scripts/
COPY common/ common/
RUN . scripts/setup.sh && PIP_NO_CACHE_DIR=1 set_up requirements.txt requirements-extras.txt
ENV VIRTUAL_ENV=/paddock/.venv PATH=/paddock/.venv/bin:$PATH
# --user may name a user that the image does not have; torch and wandb want a name and a home.
ENV HOME=/tmp USER=paddock

# For .devcontainer/: the tests' packages, and the checkout mounted.
FROM base AS dev
RUN . scripts/setup.sh && PIP_NO_CACHE_DIR=1 set_up requirements.txt requirements-extras.txt requirements-dev.txt

FROM base
COPY . .
CMD ["./paddock", "train"]
