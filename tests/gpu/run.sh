#!/usr/bin/env bash
# What needs a GPU, in ten minutes on one: bfloat16, packed flash attention, QLoRA, FSDP, activation checkpointing.
#
#   tests/gpu/run.sh [--only NAME]...       # on the GPU; exit code 0 only if nothing failed
#   tests/gpu/run.sh --device cpu           # the checks that make sense on a CPU
#
# PYTHON names another interpreter than .venv/bin/python. Each check has its own time limit; a check that cannot run here
# (no flash-attn, no bitsandbytes) is skipped and says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
[ -x "$(command -v "$PYTHON")" ] || PYTHON=python3
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" TOKENIZERS_PARALLELISM=false PYTHONPATH=".:tests${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 600 "$PYTHON" tests/gpu/checks.py "$@"
