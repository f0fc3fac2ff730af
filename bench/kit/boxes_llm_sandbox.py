"""Sandboxes of llm-sandbox for the conformance suite, in its own environment: JSON lines on stdin and stdout.

Runs with the interpreter of ``~/.cache/agentft/peers/llm-sandbox`` (``sandbox_peers_check.py`` starts it). Sessions
have the package's own defaults; a command goes through ``run(code, timeout)``, the call that its documentation shows.
Requests: open {}, exec {box, code, timeout_s}, read {box, path}, write {box, path, content}, close {box}.
"""

from __future__ import annotations

import base64
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from llm_sandbox import SandboxSession
from llm_sandbox.exceptions import SandboxTimeoutError

MEMORY_BYTES = 3 << 30  # it keeps all output in memory: endless output is to end this process, not the machine
COPY_TIMEOUT_S = 20


class Boxes:
    """Open sessions by number."""

    def __init__(self, image: str, cgroup_parent: str) -> None:
        self.image, self.cgroup_parent = image, cgroup_parent
        self.sessions: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked; the answer has what came out, or ``error``."""
        op = request["op"]
        if op == "open":
            session = SandboxSession(
                lang="python",
                image=self.image,
                skip_environment_setup=True,  # it would install packages from a registry
                runtime_configs={"command": ["bash"], "cgroup_parent": self.cgroup_parent},
            )
            try:
                session.open()
            except Exception:
                self.remove(session)
                raise
            number = len(self.sessions)
            self.sessions[number] = session
            session.execute_command("mkdir -p /sandbox /workspace")
            session.execute_command("ln -sf /usr/bin/python3 /usr/local/bin/python")  # the name that `run` calls
            return {"box": number, "container": session.container.id}
        session = self.sessions[request["box"]]
        if op == "exec":
            try:
                result = session.run(request["code"], timeout=request["timeout_s"])
            except SandboxTimeoutError:
                return {"status": "timeout", "exit_code": None, "stdout": "", "stderr": ""}
            status = "ok" if result.exit_code == 0 else "nonzero"
            return {"status": status, "exit_code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
        if op == "read":
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder, "file")
                session.copy_from_runtime(request["path"], str(target))
                return {"content": base64.b64encode(target.read_bytes()).decode()}
        if op == "write":
            with tempfile.NamedTemporaryFile() as file:
                file.write(base64.b64decode(request["content"]))
                file.flush()
                session.copy_to_runtime(file.name, request["path"])
            return {}
        self.remove(session)
        return {}

    def remove(self, session: Any) -> None:
        """End a session at once: its own ``close`` waits ten seconds."""
        if session.container is not None:
            session.client.api.remove_container(session.container.id, force=True, v=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    boxes = Boxes(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        try:
            answer = boxes.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
