"""The suite itself (what it says about a sandbox that lies), its page, its verb; what engines do for ordinary use."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console
from sandbox_engines import BACKENDS, make_engine

from agentft.cli import main
from agentft.errors import ConfigError, SandboxError
from agentft.sandbox.base import ExecRequest, ExecResult, Limits
from agentft.sandbox.conformance.check import NotRunError, Seen, Stage, check
from agentft.sandbox.conformance.engines import LIMITS
from agentft.sandbox.conformance.suite import (
    CHECKS,
    STYLES,
    all_held,
    outcomes_object,
    print_table,
    promises_table,
    run_suite,
    select,
    summary,
)
from agentft.sandbox.container import Container

Shell = Callable[..., ExecResult]
PAGE = Path(__file__).parents[2] / "docs" / "sandbox.md"


class Liar:
    """A sandbox that answers 0 and "alive" to everything, as one that makes up results would."""

    reusable = True

    def __init__(self) -> None:
        self.resets = 0

    def exec(self, request: ExecRequest) -> ExecResult:
        return ExecResult(status="ok", exit_code=0, stdout="alive\n", total_bytes=6)

    def read_file(self, path: str, max_bytes: int = 1_000_000) -> bytes:
        return b"root:x:0:0"

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Accept everything."""

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        """Nothing to end."""


class Lying:
    """Starts liars."""

    name = "liar"
    limits: Limits = LIMITS

    def start(self) -> Liar:
        return Liar()


def test_a_sandbox_that_makes_up_results_is_found_out() -> None:
    outcomes = run_suite(Lying(), [one for one in CHECKS if not one.engines_only])
    assert not all_held(outcomes)
    held = {outcome.check.name for outcome in outcomes if outcome.verdict == "held"}
    assert not held
    assert len(outcomes) > 80


@check("group", not_promised={"liar": "it lies"})
def breaks(stage: Stage) -> Seen:
    """Hold."""
    return Seen(False, stage.sh("x").stdout.strip())


@check("group")
def raises(stage: Stage) -> Seen:
    """Hold too."""
    raise SandboxError("the engine is away")


@check("group")
def elsewhere(stage: Stage) -> Seen:
    """Hold on another machine."""
    raise NotRunError("needs a moon")


def test_verdicts() -> None:
    stage = Stage(Lying())
    box = stage.box
    assert isinstance(box, Liar)
    outcomes = [stage.run(one) for one in (breaks, raises, elsewhere)]
    assert [outcome.verdict for outcome in outcomes] == ["not promised", "BROKEN", "not run"]
    assert outcomes[0].seen == "it lies (seen: alive)"
    assert outcomes[1].seen == "SandboxError: the engine is away"
    assert outcomes[2].seen == "needs a moon"
    assert box.resets == 1  # after the one check that used it
    assert breaks.must == "Hold."
    assert not all_held(outcomes)
    found = outcomes_object(outcomes, engine="liar", image="none")
    assert (found["ok"], found["verdicts"]["BROKEN"], found["checks"][2]["name"]) == (False, 1, "elsewhere")
    stage.close()


def test_the_table_shows_verdicts_and_all_that_was_seen_on_a_narrow_terminal() -> None:
    outcomes = run_suite(Lying(), (breaks, raises, elsewhere, *select(["sessions", "limits"])))
    text = io.StringIO()
    print_table(outcomes, title="liar", console=Console(file=text, width=80))
    *table, last = text.getvalue().splitlines()
    assert max(map(len, table)) <= 80
    assert [row[:14].strip() for row in table if row[:14].strip() in STYLES] == [one.verdict for one in outcomes]
    joined = "".join("".join(table).split())  # cells are folded, so compare without spaces
    for outcome in outcomes:
        assert outcome.check.name in joined
    assert "(seen:alive)" in joined
    assert last == summary(outcomes)
    assert summary(outcomes[:1]).startswith("1 check: 1 not promised;")


def test_names_groups_and_the_number_of_checks() -> None:
    assert len(CHECKS) == len({one.name for one in CHECKS}) >= 45
    assert all(one.must.endswith((".", "…")) for one in CHECKS)
    assert not {one.name for one in CHECKS} & {one.group for one in CHECKS}
    assert next(one.name for one in select(["timeout", "network"])) == "timeout"
    assert select([]) == CHECKS
    with pytest.raises(ConfigError, match="no such check"):
        select(["nothing"])


def test_the_page_has_the_table_of_the_code(tmp_path: Path) -> None:
    before, start, rest = PAGE.read_text().partition("<!-- checks: made by the suite -->\n")
    table, end, _ = rest.partition("<!-- end of checks -->")
    assert before
    assert start
    assert end
    if table != promises_table():
        new = before + start + promises_table() + end + rest.partition("<!-- end of checks -->")[2]
        (tmp_path / "sandbox.md").write_text(new)
        pytest.fail(f"docs/sandbox.md is out of date; the right page is {tmp_path}/sandbox.md")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_verb(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(backend).close()
    file = tmp_path / "found.json"
    verb = ["sandbox", "check", "--backend", backend, "--only", "streams-apart", "--only", "host-name"]
    assert main([*verb, "--json", str(file)]) == 0
    assert "2 checks: 2 held" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["engine"], found["ok"], len(found["checks"])) == (backend, True, 2)
    assert main(["sandbox", "check", "--backend", backend, "--only", "nothing"]) == 2
    assert main(["sandbox", "check", "--backend", "local", "--host", "unix:///x"]) == 2


def test_files_go_in_and_come_out(box: Container, sh: Shell) -> None:
    box.write_files({"deep/er/b.bin": b"x" * 1000, "a.txt": b"one", "/workspace/c": b""})
    assert sh("cat a.txt; stat -c %a a.txt").stdout == "one644\n"
    with pytest.raises(FileNotFoundError):
        box.read_file("missing")
    with pytest.raises(IsADirectoryError):
        box.read_file("deep")
    with pytest.raises(PermissionError):
        box.read_file("../x")
    with pytest.raises(OSError, match="bytes, more than 100"):
        box.read_file("deep/er/b.bin", max_bytes=100)
    assert box.broken is None


def test_a_shared_memory_object_costs_the_container(box: Container) -> None:
    code = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, 0o1666) >= 0)"
    assert box.exec(ExecRequest(argv=("python3", "-c", code))).stdout == "True\n"
    box.reset()
    assert not box.reusable


def test_a_wide_and_deep_tree_is_wiped_in_time(box: Container, sh: Shell) -> None:
    sh("for i in 1 2 3 4 5 6 7 8 9; do mkdir -p $i/$i/$i/$i/$i; touch $i/$i/$i/$i/$i/x; chmod 000 $i/$i; done")
    started = time.monotonic()
    box.reset()
    assert box.broken is None
    assert time.monotonic() - started < 2
    assert sh("ls -A").stdout == ""


def test_ordinary_programs_are_not_hindered_by_the_filter(box: Container) -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing, os, resource, socket, sqlite3, subprocess, tempfile, threading
def double(x): return 2 * x
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(2) as pool: print(list(pool.map(double, [1, 2])))
    with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(double, [3])))
    print(subprocess.run(["sh", "-c", "echo sub | cat"], capture_output=True, text=True).stdout.strip())
    server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())
    server.accept()[0].sendall(b"tcp"); print(client.recv(3))
    a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1))
    print(os.nice(0) <= os.nice(1), resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0)
    os.sched_setaffinity(0, os.sched_getaffinity(0)); os.setpriority(os.PRIO_PROCESS, 0, 19)
    print(sqlite3.connect(tempfile.mktemp()).execute("select 1").fetchall())
    async def main(): return (await asyncio.create_subprocess_exec("true")).returncode or await asyncio.sleep(0, 5)
    print(asyncio.run(main())); print(os.spawnlp(os.P_WAIT, "true", "true"))
"""
    box.write_files({"program.py": code.encode()})
    result = box.exec(ExecRequest(argv=("python3", "program.py"), timeout_s=20))
    lines = ["[2, 4]", "[6]", "sub", "b'tcp'", "b'x'", "True True", "[(1,)]", "5", "0"]
    assert result.stdout.splitlines() == lines, result
