"""Drives llm-sandbox, in its own environment: one JSON request a line on stdin, one answer a line on stdout.

Runs with the interpreter of ``~/.cache/agentft/peers/llm-sandbox`` (``kit.peers`` starts it). ``execute_command`` is
its cheapest call in a session that is already open; ``run`` is what its documentation shows (it copies a file first).
"""

from __future__ import annotations

import json
import sys
import time

from llm_sandbox import SandboxSession


def main() -> None:
    image = sys.argv[1]
    session = SandboxSession(
        lang="python", image=image, skip_environment_setup=True, runtime_configs={"command": ["sleep", "infinity"]}
    )
    try:
        session.open()
        session.execute_command("mkdir -p /sandbox")
        session.execute_command("ln -s /usr/bin/python3 /usr/local/bin/python")  # the name that `run` calls
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            started = time.perf_counter()
            if request["path"] == "run":
                result = session.run("pass")
            else:
                result = session.execute_command(" ".join(request["argv"]))
            seconds = time.perf_counter() - started
            print(json.dumps({"seconds": seconds, "exit_code": result.exit_code, "error": result.stderr}), flush=True)
    finally:
        if session.container is not None:  # also where open() failed half-way; close() waits ten seconds
            session.client.api.remove_container(session.container.id, force=True, v=True)


if __name__ == "__main__":
    main()
