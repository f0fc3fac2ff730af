"""Training runs in processes of their own that have imported everything: a fork is at once, a start takes seconds.

    with RunServer() as server:
        run = server.start([YAML, "run_name=a", …], processes=2)
        run.kill()                   # SIGKILL, all processes at once
        assert run.wait() == [-9, -9]

The server is this file run as a program: it imports the trainer and forks one process for each rank that is asked for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from support_agent import sessions

if TYPE_CHECKING:
    from agentft.config.schema import RunConfig

REPO = Path(__file__).resolve().parents[1]
YAMLS = REPO / "yamls" / "agent"
SMALL = ["loggers.tensorboard=false", "loggers.console=false", "data.batch_size=8", "data.microbatch_size=2"]
SMALL += ["train.eval_interval=0ba", "train.threads=1", "train.precision=fp32", "feedback.probe.every=0"]
START_S, RUN_S = 240.0, 240.0


def make_shards(folder: Path, *, count: int = 32, held_out: int = 8, config: RunConfig | None = None) -> Path:
    """Write shards of tiny sessions and return their folder; without a held-out repository they are split by hash.

    Args:
        folder: Gets ``sessions.jsonl`` and ``shards``.
        count: Sessions.
        held_out: How many of them, the last ones, are another repository's.
        config: Whose text and positions; that of tiny-glm if left out.
    """
    from agentft.config.load import load
    from agentft.data.shards import write_shards

    made = sessions(count)
    if held_out:
        names = ["calc"] * (count - held_out) + ["held-out"] * held_out
        made = [session.model_copy(update={"repository": n}) for session, n in zip(made, names, strict=True)]
    (folder / "sessions.jsonl").write_text("".join(session.model_dump_json() + "\n" for session in made))
    config = config or load(YAMLS / "tiny-glm.yaml")
    write_shards(
        [folder / "sessions.jsonl"],
        folder / "shards",
        text=config.text,
        positions=config.model.feedback_positions,
        vocab_size=600,
        holdout=["held-out"] if held_out else [],
    )
    return folder / "shards"


def free_port() -> int:
    """Return a port of the loopback device that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launcher(processes: int) -> list[str]:
    """Return the words before a script that start it with Composer's launcher; one process needs none."""
    if processes == 1:
        return [sys.executable]
    words = ["-m", "composer.cli.launcher", "-n", str(processes), "--master_port", str(free_port())]
    return [sys.executable, *words]


def launch(words: Sequence[str], *, processes: int = 1) -> subprocess.Popen[str]:
    """Start ``train.py`` with these words, as a user does; what it prints is in ``stdout``."""
    return subprocess.Popen(
        [*launcher(processes), str(REPO / "train.py"), *words],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def on_two_ranks(script: str, folder: Path) -> list[Any]:
    """Run a script on two ranks, its argument being ``folder``; return what each has left in ``seen<rank>.json``."""
    done = subprocess.run(
        [*launcher(2), script, str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in (0, 1)]


@dataclass(frozen=True)
class Started:
    """The processes of one run, in the order of their ranks; ``logs`` hold what they print."""

    server: RunServer
    pids: list[int]
    logs: list[Path]

    def kill(self) -> None:
        """Kill all processes with SIGKILL."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        """Return the exit codes, negative for signals; what is not done in time is killed."""
        return [self.server.ask({"wait": pid})["code"] for pid in self.pids]

    def ended(self) -> bool:
        """Return whether one of the processes has ended (and waits to be asked how)."""
        return any(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" for pid in self.pids)

    def output(self) -> str:
        """Return what was printed."""
        return "\n".join(log.read_text() for log in self.logs)


class RunServer:
    """Starts runs; a context manager that leaves no process behind."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def start(self, words: Sequence[str], *, processes: int = 1) -> Started:
        """Start a run over ``processes`` ranks."""
        port = free_port()
        pids, logs = [], []
        for rank in range(processes):
            self._count += 1
            logs.append(self._folder / f"process{self._count}.log")
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            more = {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {name: str(value) for name, value in {**ranks, **more}.items()} if processes > 1 else {}
            pids.append(self.ask({"words": list(words), "environment": environment, "log": str(logs[-1])})["pid"])
        return Started(self, pids, logs)

    def run(self, words: Sequence[str], *, processes: int = 1) -> None:
        """Run to the end; fail with what was printed unless every process ends well."""
        started = self.start(words, processes=processes)
        assert started.wait() == [0] * processes, started.output()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request to the server and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> RunServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=START_S)


def wait_for(condition: Callable[[], bool], seconds: float = RUN_S) -> bool:
    """Wait until a condition holds; whether it did in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def _serve() -> None:
    from agentft.train import build, evaluate, summary  # noqa: F401 (imported once, for every fork)
    from agentft.train.run import main

    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            code = _reap(request["wait"])
            alive.discard(request["wait"])
            print(json.dumps({"code": code}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(request["environment"])
            code = 1
            try:
                code = main(request["words"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        alive.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _reap(pid: int) -> int:
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    _serve()
