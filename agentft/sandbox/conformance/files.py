"""Checks of files (floor 2): what the host reads and writes, and what of the system can be changed from inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentft.sandbox.conformance.check import ATTEMPTS, Seen, Stage, brief, check, expect, refused


def refusals(stage: Stage, paths: Iterable[str], *, write: bool = True) -> Seen:
    """Read and write every path through the sandbox's file operations; all must be refused, and the box lives."""
    box, granted, tried = stage.box, [], 0
    for path in paths:
        operations: list[Callable[[], object]] = [lambda path=path: box.read_file(path)]  # type: ignore[misc]
        if write:
            operations.append(lambda path=path: box.write_files({path: b"agentft"}))  # type: ignore[misc]
        for operation in operations:
            tried += 1
            try:
                operation()
            except (OSError, ValueError):
                continue
            granted.append(ascii(path))
    text = f"granted: {', '.join(granted)}" if granted else f"{tried} of {tried} refused"
    return Seen(not granted, text)


@check("files")
def paths_that_leave(stage: Stage) -> Seen:
    """`../`, absolute, empty and impossible paths are refused, for reading and for writing."""
    paths = (
        "../x",
        "a/../../etc/passwd",
        "/etc/passwd",
        "/workspace/../etc/passwd",
        "",
        ".",
        "a\0b",
        "x\ud800",
        "//etc/x",
    )
    return refusals(stage, paths)


@check("files")
def symbolic_links(stage: Stage) -> Seen:
    """No link is followed, neither at the end of a path nor in the middle, whether or not its target is inside."""
    stage.sh("ln -s /etc/passwd link; ln -s /etc dir; mkdir real; ln -s real inner; ln -s /dev/zero zero; ln -s . self")
    seen = refusals(stage, ("link", "dir/passwd", "inner/x", "zero", "self/link", "self/self/x"))
    leaked = stage.sh("ls real").stdout
    return Seen(seen.held and not leaked, seen.text)


@check("files")
def link_race(stage: Stage) -> Seen:
    """While a survivor swaps a file and a link as fast as it can, no read gives the target, no write reaches it."""
    swap = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open('real', 'w').write('mine')\n"
        "    while True:\n"
        "        for make in (lambda: os.symlink('/etc/passwd', 'new'), lambda: os.link('real', 'new')):\n"
        "            try: make(); os.rename('new', 'swap')\n"
        "            except OSError: pass\n"
        "import time; time.sleep(0.2)"
    )
    wrong = reads = 0
    for _ in range(5):
        stage.python(swap)
        for _ in range(40):
            try:
                reads += 1
                wrong += b"root:" in stage.box.read_file("swap")
                stage.box.write_files({"swap": b"agentft"})
            except OSError:
                continue
    changed = "agentft" in stage.sh("cat /etc/passwd").stdout
    return Seen(not wrong and not changed, f"{wrong} of {reads} reads gave the target")


@check("files")
def fifos_and_devices(stage: Stage) -> Seen:
    """Pipes, sockets, folders and devices are refused without waiting."""
    stage.sh("mkfifo fifo; mkdir folder; ln -s /dev/zero zero")
    stage.python("import socket; socket.socket(socket.AF_UNIX).bind('sock')")
    return refusals(stage, ("fifo", "folder", "zero", "sock", "/dev/zero", "/dev/stdin"))


@check("files")
def hard_links(stage: Stage) -> Seen:
    """A file of the system cannot be linked into the workspace."""
    code = ATTEMPTS + (
        "for path in ('/etc/passwd', '/usr/bin/env', '/proc/self/environ'):\n"
        "    attempt(path, lambda: os.link(path, 'copy'))\n"
        "done()"
    )
    return refused(stage.python(code), 3)


@check("files")
def locked_workspace(stage: Stage) -> Seen:
    """A workspace without permissions is an error to the host, not a failure, and whole again in the next session."""
    stage.sh("mkdir -p a/b; echo 1 > a/b/x; chmod 000 a/b; chmod 500 a; chmod 000 /workspace")
    seen = refusals(stage, ("x", "a/b/x"))
    stage.next_session()
    after = stage.sh("ls -A /workspace; echo 1 > /workspace/new && cat /workspace/new")
    return Seen(seen.held and after.stdout == "1\n", f"{seen.text}; then {brief(after)}")


@check("files")
def odd_names(stage: Stage) -> Seen:
    """Names with newlines, terminal codes, invalid UTF-8 and of 255 bytes can be made, listed, and are gone later."""
    code = (
        "import os\n"
        r"names = [b'a\nb', b'\x1b[2J', b'\xff\xfe', b'x' * 255, b'-rf', b'*', b' ', b'\\', b'a\tb', '\u202e'.encode()]"
        + "\n"
        "for name in names:\n"
        "    os.mkdir(name); open(name + b'/' + name, 'w').close()\n"
        "print(len(os.listdir(b'.')))"
    )
    made, listed = stage.python(code), stage.sh("ls -b | wc -l")
    stage.next_session()
    left = stage.sh("ls -A | wc -l").stdout.strip()
    held = (made.stdout, listed.stdout.strip(), left) == ("10\n", "10", "0")
    return Seen(held, f"{made.stdout.strip()} made, {listed.stdout.strip()} listed, {left} left")


@check("files")
def content_is_exact(stage: Stage) -> Seen:
    """What the host writes is what programs and the host read: every byte, deep paths, umlauts, replaced files."""
    content = bytes(range(256)) * 1000
    box = stage.box
    box.write_files({"deep/er/b.bin": content, "empty": b"", "ümlaut ü": b"u", "a": b"long" * 100})
    box.write_files({"a": b"short"})
    inside = stage.sh("sha256sum < deep/er/b.bin; cat a 'ümlaut ü'; wc -c < empty").stdout
    import hashlib

    expected = f"{hashlib.sha256(content).hexdigest()}  -\nshortu0\n"
    same = box.read_file("deep/er/b.bin") == content and box.read_file("/workspace/a") == b"short"
    return Seen(same and inside == expected, "256,000 bytes equal" if same else ascii(inside))


@check("files")
def tar_traversal(stage: Stage) -> Seen:
    """An archive with `../`, absolute names and links changes nothing outside; the host unpacks nothing."""
    code = (
        "import io, os, tarfile\n"
        "with tarfile.open('bad.tar', 'w') as bad:\n"
        "    for name in ('../../etc/agentft', '/etc/agentft', '../agentft', '/usr/agentft', '/agentft'):\n"
        "        one = tarfile.TarInfo(name); one.size = 3; bad.addfile(one, io.BytesIO(b'bad'))\n"
        "    one = tarfile.TarInfo('link'); one.type = tarfile.SYMTYPE; one.linkname = '/etc'; bad.addfile(one)\n"
        "    one = tarfile.TarInfo('link/agentft'); one.size = 3; bad.addfile(one, io.BytesIO(b'bad'))\n"
    )
    stage.python(code)
    stage.sh("tar -P -xf bad.tar; python3 -c \"import tarfile; tarfile.open('bad.tar').extractall()\"")
    found = stage.sh("find / -name 'agentft' -newer /workspace/bad.tar -not -path '/proc/*' 2>/dev/null").stdout.split()
    seen = refusals(stage, ("link/agentft", "link/passwd"))
    return Seen(seen.held and not found, f"{len(found)} outside; {seen.text}")


@check("files")
def read_only_system(stage: Stage) -> Seen:
    """Nothing of the system can be written: /etc, /usr, /, /var, the interpreter's packages."""
    code = ATTEMPTS + (
        "import sysconfig\n"
        "folders = ['/', '/etc', '/usr', '/usr/bin', '/var', '/root', '/home', '/dev', sysconfig.get_path('purelib')]\n"
        "for folder in folders:\n"
        "    attempt(folder, lambda: os.close(os.open(folder + '/agentft', os.O_CREAT | os.O_WRONLY)))\n"
        "python = os.path.realpath(sys.executable)\n"
        "for path in ('/etc/passwd', '/etc/hosts', '/etc/resolv.conf', '/usr/bin/env', python):\n"
        "    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))\n"
        "    attempt(path, lambda: os.chmod(path, 0o777))\n"
        "done()"
    )
    return refused(stage.python(code), 19)


@check("files")
def kernel_files(stage: Stage) -> Seen:
    """No write to /proc/sys, /proc/sysrq-trigger, /sys or /proc/irq is possible."""
    code = ATTEMPTS + (
        "import glob\n"
        "paths = ['/proc/sysrq-trigger', '/proc/sys/kernel/hostname', '/proc/sys/kernel/core_pattern',\n"
        "         '/proc/sys/vm/drop_caches', '/proc/sys/net/ipv4/ip_forward', '/proc/sys/kernel/pid_max',\n"
        "         '/sys/kernel/mm/transparent_hugepage/enabled', '/sys/power/state', '/proc/irq/0/smp_affinity',\n"
        "         '/sys/fs/cgroup/memory/memory.limit_in_bytes', '/sys/fs/cgroup/memory.max', '/proc/kmsg']\n"
        "for path in paths: attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))\n"
        "done()"
    )
    return refused(stage.python(code), 12)


@check("files")
def devices(stage: Stage) -> Seen:
    """There are no disks, no /dev/mem, no /dev/kvm, no /dev/fuse, and none can be made."""
    code = ATTEMPTS + (
        "import stat\n"
        "harmless = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', 'console'}\n"
        "for folder, _, names in os.walk('/dev'):\n"
        "    for name in names:\n"
        "        mode = os.lstat(os.path.join(folder, name)).st_mode\n"
        "        if (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)) and name not in harmless and 'pts' not in folder:\n"
        "            granted.append(folder + '/' + name)\n"
        "for name in ('mem', 'kmem', 'port', 'kvm', 'fuse', 'kmsg', 'vda', 'sda', 'loop0', 'loop1', 'net/tun'):\n"
        "    attempt(name, lambda: os.close(os.open('/dev/' + name, os.O_RDONLY)))\n"
        "for kind in (stat.S_IFBLK, stat.S_IFCHR):\n"
        "    attempt('mknod', lambda: os.mknod('/workspace/device', kind | 0o666, os.makedev(1, 1)))\n"
        "done()"
    )
    return refused(stage.python(code), 13)


@check("files")
def no_host_folders(stage: Stage) -> Seen:
    """No engine socket and no writable mount of the host: what is mounted writable is memory, of limited size."""
    code = (
        "import os, stat\n"
        "kinds = ('tmpfs', 'proc', 'devpts', 'mqueue')\n"
        "bad = []\n"
        "for line in open('/proc/self/mountinfo'):\n"
        "    left, _, right = line.partition(' - ')\n"
        "    target, options, kind = left.split()[4], left.split()[5], right.split()[0]\n"
        "    writable = 'rw' in options.split(',') and kind not in kinds\n"
        "    if writable and not stat.S_ISCHR(os.stat(target).st_mode): bad.append(target)\n"  # /dev/null hides a file
        "for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock', '/run/podman'):\n"
        "    if os.path.exists(path): bad.append(path)\n"
        "print(bad)"
    )
    return expect((result := stage.python(code)).stdout == "[]\n", result, "none")
