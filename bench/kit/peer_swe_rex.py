"""Drives SWE-ReX, in its own environment: one JSON request a line on stdin, one answer a line on stdout.

Runs with the interpreter of ``~/.cache/agentft/peers/swe-rex`` (``kit.peers`` starts it) and the image that
``kit.peers`` derives: the benchmark's image plus its server. Paths: ``session`` is ``run_in_session`` (what agents
use), ``execute`` its call without a shell session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

logging.disable(logging.CRITICAL)


async def main() -> None:
    deployment = DockerDeployment(image=sys.argv[1], pull="never", startup_timeout=30.0, docker_args=sys.argv[2:])
    try:
        await deployment.start()
        runtime = deployment.runtime
        await runtime.create_session(CreateBashSessionRequest())
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            started = time.perf_counter()
            if request["path"] == "session":
                result = await runtime.run_in_session(BashAction(command=" ".join(request["argv"])))
            else:
                result = await runtime.execute(Command(command=request["argv"]))
            seconds = time.perf_counter() - started
            print(json.dumps({"seconds": seconds, "exit_code": result.exit_code, "error": ""}), flush=True)
    finally:
        await deployment.stop()


if __name__ == "__main__":
    asyncio.run(main())
