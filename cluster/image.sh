#!/bin/sh
# Install the packages of requirements.lock into an image, for cluster/Containerfile, cluster/apptainer.def and the Pyxis command of
# docs/cluster.md. Run it as root in a fresh Debian with Python 3.11 or newer. It needs install.sh, requirements.lock and pyproject.toml in
# /opt/wide-mlps, but not the code.
# CUDA=cu128 installs another build of torch (docs/cluster.md).
set -eu

# Triton and torch.compile need the compiler; Pillow-SIMD needs the headers for JPEG
apt-get update
apt-get install -y --no-install-recommends gcc g++ libc6-dev git libjpeg62-turbo-dev zlib1g-dev
rm -rf /var/lib/apt/lists/*
sh /opt/wide-mlps/install.sh
rm -rf /root/.cache /opt/wide-mlps/.cache
/opt/wide-mlps/.venv/bin/python -c 'import torch, deepspeed, PIL.Image; print("torch", torch.__version__)'
