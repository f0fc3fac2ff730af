"""Engines for the sandbox tests; Docker is skipped without an engine, except under CI."""

from __future__ import annotations

import os

import pytest

from agentft.errors import SandboxError
from agentft.sandbox.base import Limits
from agentft.sandbox.container import Engine

LIMITS = Limits(timeout_s=10, memory_mib=256, pids=64, workspace_mib=16, tmp_mib=16, shm_mib=4, file_mib=8)
BACKENDS = [pytest.param("docker", marks=pytest.mark.engine), "local"]


def make_engine(backend: str, limits: Limits = LIMITS, run_name: str = "tests") -> Engine:
    """Return an engine, or skip with the reason (fail where CI promises one)."""
    try:
        if backend == "docker":
            from agentft.sandbox.docker import DockerEngine
            from agentft.sandbox.images import ensure_image

            ensure_image("python")
            return DockerEngine(image="python", limits=limits, run_name=run_name)
        from agentft.sandbox.local import LocalEngine

        return LocalEngine(limits=limits)
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{backend}: {error.what}")
