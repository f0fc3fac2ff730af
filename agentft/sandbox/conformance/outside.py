"""Checks of the network and of secrets (floor 2): nothing goes out, and nothing of the host can be seen."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentft.sandbox.base import ExecRequest
from agentft.sandbox.conformance.check import ATTEMPTS, SECRET_VARIABLE, Seen, Stage, brief, check, expect, refused
from agentft.sandbox.container import BASE_ENV

HARMLESS = ("HOSTNAME", "PWD", "SHLVL", "_", "LC_CTYPE", "PYTHONUNBUFFERED")  # engines, shells and Python set these


@check("network")
def only_loopback(stage: Stage) -> Seen:
    """There is one network interface, the loopback, and no route."""
    code = (
        "import socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "routes = open('/proc/net/route').read().splitlines()[1:]\n"
        "print(names, len(routes))"
    )
    return expect((result := stage.python(code)).stdout == "['lo'] 0\n", result)


@check("network")
def connections(stage: Stage) -> Seen:
    """No address answers: internet, the engine's bridge, the metadata service, the host; refused at once."""
    code = ATTEMPTS + (
        "import socket\n"
        "for address in (('8.8.8.8', 53), ('1.1.1.1', 443), ('172.17.0.1', 22), ('169.254.169.254', 80),\n"
        "                ('10.0.2.2', 80), ('192.168.0.1', 80)):\n"
        "    attempt(address, lambda: socket.create_connection(address, timeout=2).close())\n"
        "for address in (('2001:4860:4860::8888', 53), ('fe80::1', 80)):\n"
        "    attempt(address, lambda: socket.create_connection(address, timeout=2).close())\n"
        "done()"
    )
    return refused(stage.python(code), 8)


@check("network")
def name_resolution(stage: Stage) -> Seen:
    """No name is resolved and no datagram leaves."""
    code = ATTEMPTS + (
        "import socket\n"
        "for name in ('example.com', 'host.docker.internal', 'metadata.google.internal'):\n"
        "    attempt(name, lambda: socket.getaddrinfo(name, 80))\n"
        "for address in (('8.8.8.8', 53), ('255.255.255.255', 67), ('224.0.0.251', 5353)):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    attempt(address, lambda: s.sendto(b'x' * 30, address))\n"
        "done()"
    )
    return refused(stage.python(code), 6)


@check("network")
def raw_sockets(stage: Stage) -> Seen:
    """Raw and packet sockets are refused."""
    code = ATTEMPTS + (
        "import socket\n"
        "for name, kind in (('icmp', (2, 3, 1)), ('raw', (2, 3, 255)), ('raw6', (10, 3, 58)),\n"
        "                   ('packet', (17, 3, 768)), ('datagram packet', (17, 2, 768))):\n"
        "    attempt(name, lambda: socket.socket(*kind).close())\n"
        "done()"
    )
    return refused(stage.python(code), 5)


@check("network")
def odd_socket_families(stage: Stage) -> Seen:
    """Sockets of rare kinds are refused: VSOCK (it reaches the hypervisor), ALG, BLUETOOTH, CAN, TIPC, RDS, XDP, …"""
    families = {"vsock": 40, "alg": 38, "bluetooth": 31, "can": 29, "tipc": 30, "rds": 21, "xdp": 44, "smc": 43}
    families |= {"kcm": 41, "nfc": 39, "x25": 9, "appletalk": 5, "ax25": 3, "llc": 26, "key": 15}
    code = ATTEMPTS + (
        f"for name, family in {families!r}.items():\n"
        "    for kind in (1, 2, 3, 5): call(name, libc.socket(family, kind, 0))\n"
        "done()"
    )
    return refused(stage.python(code), 4 * len(families))


@check("network")
def sockets_of_the_host(stage: Stage) -> Seen:
    """Abstract sockets of the host (not files, so no mount hides them) are not reachable."""
    import secrets
    import socket

    name = "\0agentft-" + secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen(1)
        code = ATTEMPTS + (
            f"import socket\nattempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect({name!r}))\ndone()"
        )
        return refused(stage.python(code), 1)


@check("secrets")
def environment(stage: Stage) -> Seen:
    """A program sees the declared variables only, whatever the trainer's environment holds."""
    result = stage.box.exec(ExecRequest(argv=("env",), env={"EXTRA": "1"}))
    names = {line.split("=")[0] for line in result.stdout.splitlines()}
    odd = names - {*BASE_ENV, "EXTRA", *HARMLESS}
    held = not odd and "EXTRA" in names and stage.secret not in result.stdout
    return Seen(held, f"{len(names)} variables" if held else f"also {', '.join(sorted(odd))}")


@check("secrets")
def environment_of_others(stage: Stage) -> Seen:
    """The trainer's environment is not to be found in any process, command line or file under /proc."""
    code = (
        "import glob\n"
        "found = []\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/*'):\n"
        "    try: text = open(path, 'rb').read(1 << 20) if path not in ('/proc/kmsg',) else b''\n"
        "    except OSError: continue\n"
        f"    if {stage.secret.encode()!r} in text or {SECRET_VARIABLE.encode()!r} in text: found.append(path)\n"
        "print(found)"
    )
    result = stage.sh("cat > hunt.py; exec python3 hunt.py", stdin=code.encode())
    return expect(result.stdout == "[]\n", result, "not found")


@check("secrets")
def files_of_the_host(stage: Stage) -> Seen:
    """A secret in the host's temporary folder, and keys where keys usually are, are not to be found."""
    with tempfile.TemporaryDirectory(prefix="agentft-check-") as folder:
        Path(folder, "secret").write_text(stage.secret)
        code = (
            "import glob, os\n"
            f"found = [path for path in ({folder!r},) if os.path.exists(path)]\n"
            "for pattern in ('/root/.*', '/home/*/.ssh*', '/home/*/.aws*', '/home/*/.netrc', '/var/run/secrets/*',\n"
            "                '/run/secrets/*', '/etc/ssl/private/*', '/etc/kubernetes/*', '/mnt/*', '/media/*'):\n"
            "    found += glob.glob(pattern)\n"
            "for path in found:\n"
            "    try: os.listdir(path) if os.path.isdir(path) else open(path).close(); print('readable', path)\n"
            "    except OSError: pass\n"
            "print('done')"
        )
        result = stage.python(code)
    skeleton = {"/root/.bashrc", "/root/.profile"}  # of the image
    readable = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("readable")} - skeleton
    return Seen(not readable and result.stdout.endswith("done\n"), ", ".join(sorted(readable)) or brief(result))


@check("secrets")
def processes_of_the_host(stage: Stage) -> Seen:
    """A program sees its own processes and process 1 only."""
    result = stage.python("import os; print([int(p) for p in os.listdir('/proc') if p.isdigit()], os.getpid())")
    pids, _, own = result.stdout.rpartition(" ")
    return expect(pids == f"[1, {own.strip()}]", result)


@check("secrets")
def inherited_descriptors(stage: Stage) -> Seen:
    """A program starts with its three streams and nothing else open."""
    result = stage.sh("ls /proc/self/fd; readlink /proc/self/fd/0")
    return expect(result.stdout.split() == ["0", "1", "2", "3", "/dev/null"], result, "0, 1, 2")  # 3: ls's own
