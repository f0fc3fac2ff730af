"""Checks of limits (floor 2): memory, disk, files, processors. Who exceeds one fails alone, and says so."""

from __future__ import annotations

import time

from agentft.sandbox.conformance.check import Seen, Stage, brief, check, expect

MIB = 1 << 20
NO_CONTROL_GROUP = dict.fromkeys(
    ("local", "podman without control groups"),
    "no control group: memory is limited by sampling, processors not at all",
)


@check("limits")
def memory_bomb(stage: Stage) -> Seen:
    """More memory than allowed ends the program as oom; process 1 lives and the next call answers."""
    size = stage.limits.memory_mib * MIB * 3 // 2
    code = f"a = bytearray({size})\nfor i in range(0, {size}, 4096): a[i] = 1\nprint('lived')"
    with stage.fresh() as box:
        bomb, after = stage.python(code, box=box), stage.sh("echo alive", box=box)
        held = (bomb.status, bomb.stdout, after.stdout) == ("oom", "", "alive\n") and not box.reusable
        return Seen(held, f"{brief(bomb)}; then {brief(after)}")


@check("limits")
def memory_by_many(stage: Stage) -> Seen:
    """Many small processes, each less than process 1, that use up memory together are oom, never infra."""
    each = stage.limits.memory_mib * MIB * 3 // 2 // (stage.limits.pids - 12)
    code = (
        "import mmap, os, time\n"
        "def low():\n"
        "    try: open('/proc/self/oom_score_adj', 'w').write('0')\n"
        "    except OSError: pass\n"
        "low()\n"
        f"for i in range({stage.limits.pids - 12}):\n"
        "    if os.fork() == 0:\n"
        f"        low(); m = mmap.mmap(-1, {each})\n"
        f"        for k in range(0, {each}, 4096): m[k] = 1\n"
        "        time.sleep(4); os._exit(0)\n"
        "time.sleep(4); os._exit(7)"
    )
    with stage.fresh() as box:
        bomb = stage.python(code, timeout_s=5, box=box)
        return Seen(bomb.status == "oom" and not box.reusable, brief(bomb))


@check("limits", not_promised=NO_CONTROL_GROUP)
def memory_outside_processes(stage: Stage) -> Seen:
    """Memory that belongs to no process (files in memory) counts: oom, or refused."""
    size = stage.limits.memory_mib * 3 // 2
    code = (
        "import os\n"
        "block, fds, written = b'x' * (1 << 20), [], 0\n"
        f"while written < {size}:\n"
        "    fds.append(os.memfd_create('x'))\n"
        "    try:\n"
        f"        while written < {size}: os.write(fds[-1], block); written += 1\n"
        "    except OSError: pass\n"
        "print('kept', written, 'MiB')"
    )
    with stage.fresh() as box:
        bomb = stage.python(code, box=box)
        return Seen(bomb.status == "oom", brief(bomb))


@check("limits")
def full_workspace(stage: Stage) -> Seen:
    """Filling the workspace, the temporary folder or shared memory gives ENOSPC; freed again, work goes on."""
    code = (
        "import errno, os\n"
        "for folder in ('/workspace', '/tmp', '/dev/shm'):\n"
        "    names, reason, block, total = [], 'no end', b'x' * 65536, 0\n"
        "    while total < 200 << 20 and reason == 'no end':\n"
        "        names.append(f'{folder}/fill{len(names)}')\n"
        "        try:\n"
        "            with open(names[-1], 'wb', buffering=0) as file:\n"
        "                for i in range(64): total += file.write(block)\n"
        "        except OSError as error: reason = errno.errorcode[error.errno]\n"
        "    for name in names: os.unlink(name)\n"
        "    print(reason, end=' ')\n"
    )
    result = stage.python(code, timeout_s=30)
    after = stage.sh("echo new > /workspace/new && cat /workspace/new")
    return Seen(result.stdout.split() == ["ENOSPC"] * 3 and after.stdout == "new\n", brief(result))


@check("limits")
def large_file(stage: Stage) -> Seen:
    """One file cannot be larger than allowed, also a sparse one; the program is told (EFBIG)."""
    limit = stage.limits.file_mib * MIB
    code = (
        "import errno, os\n"
        "fd = os.open('/tmp/large', os.O_CREAT | os.O_WRONLY)\n"
        f"for work in (lambda: os.ftruncate(fd, {limit + 1}), lambda: os.pwrite(fd, b'x', {limit})):\n"
        "    try: work(); print('allowed')\n"
        "    except OSError as error: print(errno.errorcode[error.errno])"
    )
    return expect((result := stage.python(code)).stdout.split() == ["EFBIG"] * 2, result)


@check("limits")
def open_files(stage: Stage) -> Seen:
    """Thousands of open files are refused (EMFILE)."""
    code = (
        "import errno, os\n"
        "n = 0\n"
        "try:\n"
        "    while n < 5000: os.open('/dev/null', 0); n += 1\n"
        "except OSError as error: print(errno.errorcode[error.errno])"
    )
    return expect((result := stage.python(code)).stdout == "EMFILE\n", result)


@check("limits")
def hundred_thousand_files(stage: Stage) -> Seen:
    """100,000 small files are the program's right; the next session sees none of them."""
    code = "import os\nfor i in range(100000): os.close(os.open(f'f{i}', os.O_CREAT | os.O_WRONLY))\nprint('made')"
    made = stage.python(code, timeout_s=40)
    stage.next_session()
    left = stage.sh("ls -A /workspace | wc -l")
    return Seen(made.stdout == "made\n" and left.stdout.strip() == "0", f"{brief(made)}; {left.stdout.strip()} left")


@check("limits")
def deep_folders(stage: Stage) -> Seen:
    """Folders 5,000 deep (longer than any path may be) are gone in the next session."""
    code = "import os\nfor i in range(5000): os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close(); print('made')"
    made = stage.python(code)
    stage.next_session()
    left = stage.sh("ls -A /workspace | wc -l")
    return Seen(made.stdout == "made\n" and left.stdout.strip() == "0", f"{brief(made)}; {left.stdout.strip()} left")


@check("limits")
def zip_bomb(stage: Stage) -> Seen:
    """An archive of 200 KB that unpacks to 200 MB fails on the size of a file; nobody else unpacks it."""
    code = (
        "import zipfile, shutil\n"
        "with zipfile.ZipFile('bomb.zip', 'w', zipfile.ZIP_DEFLATED) as bomb:\n"
        "    with bomb.open('zeros', 'w', force_zip64=True) as file:\n"
        "        for i in range(200): file.write(bytes(1 << 20))\n"
        "zipfile.ZipFile('bomb.zip').extractall('out')"
    )
    result = stage.python(code, timeout_s=60)
    return expect(
        result.exit_code == 1 and ("too large" in result.stderr or "No space" in result.stderr),
        result,
        "nonzero 1, " + result.stderr.strip().splitlines()[-1] if result.stderr else "",
    )


@check("limits")
def core_dumps(stage: Stage) -> Seen:
    """A crash leaves no core file and says only its signal."""
    result = stage.sh(
        "ulimit -c unlimited 2>/dev/null; cd /workspace; bash -c 'kill -SEGV $$'; echo $?; ls -A; ulimit -c"
    )
    return expect(result.stdout.split() == ["139", "0"], result)


@check("limits", not_promised=NO_CONTROL_GROUP)
def processor_share(stage: Stage) -> Seen:
    """Three busy processes together get no more processor time than `cpus`."""
    code = (
        "import os, time\n"
        "children = []\n"
        "for i in range(3):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        end = time.monotonic() + 1.5\n"
        "        while time.monotonic() < end: pass\n"
        "        os._exit(0)\n"
        "started = time.monotonic()\n"
        "for i in range(3): os.wait()\n"
        "t = os.times()\n"
        "print(round((t.children_user + t.children_system) / (time.monotonic() - started + 1e-9), 2))"
    )
    result = stage.python(code)
    share = float(result.stdout or "nan")
    return Seen(share <= 1.25 * stage.limits.cpus, f"{share} processors")


@check("limits")
def huge_reads_of_the_host(stage: Stage) -> Seen:
    """A file larger than asked for is an error, not a silently shorter content; sparse ones too, at once."""
    started = time.monotonic()
    stage.sh(f"head -c 3000000 /dev/zero > long; truncate -s {stage.limits.file_mib - 1}M sparse")
    said = []
    for path in ("long", "sparse"):
        try:
            said.append(f"{len(stage.box.read_file(path, max_bytes=100_000))} bytes")
        except OSError as error:
            said.append(error.strerror or "")
    seconds = time.monotonic() - started
    return Seen(all("more than 100000" in text for text in said) and seconds < 3, "; ".join(said))
