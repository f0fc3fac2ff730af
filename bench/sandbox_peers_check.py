"""What the conformance suite catches: llm-sandbox with its defaults beside our Docker engine, check by check.

    python bench/sandbox_peers_check.py [--only GROUP] [--json FILE]

The peer comes from PyPI into an environment of its own, and gets the same image. Its containers live in a control group
that keeps bombs from taking this machine down (600 processes, 2 GiB); what that group does is not its own merit.
Checks of an engine from outside are left out, except one: its owner is killed, what is left? Gates are ours only.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from select import select as wait_for
from typing import Any

from kit.peers import PEERS, PeerError, environment
from rich.console import Console
from rich.table import Table

from agentft.errors import SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits
from agentft.sandbox.conformance.check import Outcome
from agentft.sandbox.conformance.engines import LIMITS, open_subject
from agentft.sandbox.conformance.suite import CHECKS, STYLES, all_held, run_suite, select
from agentft.sandbox.docker import connect, image_reference

BELT = "agentft-peer"
BELT_PROCESSES, BELT_BYTES = 600, 2 << 30
SLACK_S = 30.0
OWNER_KILLED = "trainer-killed-when-idle"
QUICK = ("results", "network", "secrets", "privileges")
PROGRAM = """
import base64, os
os.makedirs('/workspace', exist_ok=True)
argv, env, cwd, data = {argv!r}, {env!r}, {cwd!r}, {data!r}
try:
    if data:
        fd = os.open('/tmp', os.O_TMPFILE | os.O_RDWR); os.write(fd, base64.b64decode(data)); os.lseek(fd, 0, 0)
        os.dup2(fd, 0)
    os.chdir(os.path.join('/workspace', cwd))
    os.environ.update(env)
    os.execvp(argv[0], argv)
except FileNotFoundError: os._exit(127)
except (OSError, ValueError): os._exit(126)
"""


class PeerSubject:
    """llm-sandbox under test. Meets ``check.Subject``."""

    name = "llm-sandbox"
    limits: Limits = LIMITS  # what the checks expect; the peer has no such limits by default

    def __init__(self, image: str) -> None:
        python = environment(self.name, PEERS[self.name].requirements)
        script = Path(__file__).parent / "kit/boxes_llm_sandbox.py"
        self._command = [str(python), str(script), image_reference(image), f"/{BELT}"]
        self._process: subprocess.Popen[str] | None = None
        self.containers: list[str] = []

    def start(self) -> PeerBox:
        """Open a session."""
        answer = self.ask({"op": "open"}, 60)
        self.containers.append(answer["container"])
        return PeerBox(self, answer["box"], answer["container"])

    def ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Send a request to the peer's process. Raises ``SandboxError`` if it does not answer or has failed."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        ready, _, _ = wait_for([self._process.stdout], [], [], within_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill_owner()
            raise SandboxError("the peer ended" if ready else f"the peer does not answer within {within_s:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer

    def kill_owner(self) -> None:
        """SIGKILL the process that owns the sessions."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the peer's process and remove what it left."""
        self.kill_owner()
        with contextlib.closing(connect()) as client:
            for container in self.containers:
                with contextlib.suppress(Exception):
                    client.remove_container(container, force=True, v=True)


class PeerBox:
    """One session. Meets ``check.Box``; the peer has no reset, so every session gets a container of its own."""

    reusable = False

    def __init__(self, subject: PeerSubject, number: int, container: str) -> None:
        self._subject, self._number, self._container, self._open = subject, number, container, True

    def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command by ``run(code, timeout)``: the code becomes the command."""
        timeout_s = request.timeout_s or LIMITS.timeout_s
        data = base64.b64encode(request.stdin).decode()
        code = PROGRAM.format(argv=request.argv, env=dict(request.env), cwd=request.cwd, data=data)
        started = time.monotonic()
        try:
            found = self._ask({"op": "exec", "code": code, "timeout_s": timeout_s}, timeout_s + SLACK_S)
        except SandboxError as error:
            return ExecResult(status="infra", exit_code=None, stderr=error.what)
        size = len(found["stdout"].encode("utf-8", "replace")) + len(found["stderr"].encode("utf-8", "replace"))
        return ExecResult(**found, duration_s=time.monotonic() - started, total_bytes=size)

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        """Read by ``copy_from_runtime``, which knows no largest size."""
        try:
            answer = self._ask({"op": "read", "path": os.path.join("/workspace", path)}, SLACK_S)
        except SandboxError as error:
            raise OSError(error.what) from error
        return base64.b64decode(answer["content"])

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write by ``copy_to_runtime``."""
        for path, content in files.items():
            text = base64.b64encode(content).decode()
            try:
                self._ask({"op": "write", "path": os.path.join("/workspace", path), "content": text}, SLACK_S)
            except SandboxError as error:
                raise OSError(error.what) from error

    def reset(self) -> None:
        """Nothing: see the class."""

    def close(self) -> None:
        """Remove the container."""
        if self._open:
            self._open = False
            with contextlib.suppress(SandboxError):
                self._ask({"op": "close"}, SLACK_S)
            with contextlib.suppress(Exception), contextlib.closing(connect()) as client:
                client.remove_container(self._container, force=True, v=True)  # where its process has ended

    def _ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        return self._subject.ask({"box": self._number, **request}, within_s)


@contextlib.contextmanager
def belt() -> Iterator[None]:
    """Make the control group of the peer's containers. Raises ``PeerError`` where that is not possible."""
    with contextlib.closing(connect()) as client:
        driver = client.info().get("CgroupDriver")
    root = Path("/sys/fs/cgroup")
    if os.getuid() != 0 or driver != "cgroupfs":
        raise PeerError(f"no control group for the peer's bombs: needs root and Docker's cgroupfs driver, not {driver}")
    one = (root / "cgroup.controllers").exists()
    limits = {"pids.max": BELT_PROCESSES, "memory.max" if one else "memory.limit_in_bytes": BELT_BYTES}
    folders = set()
    for name, value in limits.items():
        folder = root / BELT if one else root / name.partition(".")[0] / BELT
        folder.mkdir(exist_ok=True)
        folders.add(folder)
        (folder / name).write_text(str(value))
    try:
        yield
    finally:
        time.sleep(0.5)
        for folder in {*folders, *(() if one else root.glob(f"*/{BELT}"))}:
            with contextlib.suppress(OSError):
                folder.rmdir()


def check_peer(image: str, only: list[str], report: Any) -> list[Outcome]:
    """Run the suite on the peer, then kill its owner and look what is left."""
    chosen = select(only)
    checks = [one for one in chosen if not one.engines_only]
    with belt():
        subject = PeerSubject(image)
        try:
            try:
                box = subject.start()
            except SandboxError as error:
                raise PeerError(f"the peer does not start: {error.what}") from error
            with contextlib.closing(box):
                if (first := box.exec(ExecRequest(argv=("echo", "works")))).stdout != "works\n":
                    raise PeerError(f"the peer does not run commands here: {first.stderr}")
            outcomes = run_suite(subject, checks, report)
            for one in [one for one in chosen if one.name == OWNER_KILLED]:
                outcomes.append(_owner_killed(subject, one.name))
                report(outcomes[-1])
            return outcomes
        finally:
            subject.close()


def _owner_killed(subject: PeerSubject, name: str) -> Outcome:
    box = subject.start()
    subject.kill_owner()
    time.sleep(5)
    with contextlib.closing(connect()) as client:
        left = [entry for entry in client.containers(all=True) if entry["Id"] == subject.containers[-1]]
    box.close()
    one = next(one for one in CHECKS if one.name == name)
    return Outcome(check=one, verdict="BROKEN" if left else "held", seen=f"{len(left)} left after 5 s", seconds=5.0)


def print_side_by_side(ours: list[Outcome], peers: list[Outcome]) -> None:
    """Print one row a check: what must happen, both verdicts, what was seen of the peer."""
    table = Table(title="the same checks on both, same image", title_justify="left")
    for heading in ("check", "must happen", "agentft", "llm-sandbox", "seen of llm-sandbox"):
        table.add_column(heading, overflow="fold")
    found = {outcome.check.name: outcome for outcome in peers}
    for outcome in ours:
        if peer := found.get(outcome.check.name):
            words = [f"[{STYLES[one.verdict]}]{one.verdict}[/]" for one in (outcome, peer)]
            seen = peer.seen[:160].replace("[", r"\[")
            table.add_row(outcome.check.name, outcome.check.must.replace("[", r"\["), *words, seen)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="python")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a check or a group")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    only = arguments.only or (list(QUICK) if arguments.quick else [])
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(130))

    def report(outcome: Outcome) -> None:
        print(f"{outcome.verdict:13} {outcome.check.name} ({outcome.seconds:.1f} s)", file=sys.stderr)

    with open_subject("docker", image=arguments.image, host=None) as subject:
        ours = run_suite(subject, [one for one in select(only) if not one.engines_only or one.name == OWNER_KILLED])
    try:
        peers, problem = check_peer(arguments.image, only, report), None
    except PeerError as error:
        peers, problem = [], str(error)
        print(f"llm-sandbox was not measured: {problem}", file=sys.stderr)
    print_side_by_side(ours, peers)
    counts = {"agentft": Counter(o.verdict for o in ours), "llm-sandbox": Counter(o.verdict for o in peers)}
    print("; ".join(f"{name}: {dict(count)}" for name, count in counts.items()))
    broken = counts["agentft"]["BROKEN"]
    gates = [{"name": "broken promises of ours", "value": broken, "target": 0, "better": "lower", "ok": broken == 0}]
    if arguments.json:
        context = {"verdicts": counts, "problem": problem, "peer": {o.check.name: [o.verdict, o.seen] for o in peers}}
        Path(arguments.json).write_text(json.dumps({"gates": gates, "context": context}, indent=1) + "\n")
    return 0 if all_held(ours) and problem is None else 4


if __name__ == "__main__":
    sys.exit(main())
