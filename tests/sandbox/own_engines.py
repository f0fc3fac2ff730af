"""Docker engines of the tests' own: they may be killed. Everything that they make is gone after ``close``.

Needs root and dockerd. One may live in its own network namespace, reached over TLS through a veth pair.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentft.sandbox.conformance.dockerd import children_of, processes_of
from agentft.sandbox.docker import connect

STARTED_WITHIN_S = 30.0
SUBNET = "10.213.77"


def need_own_engines(*programs: str) -> None:
    """Skip the test with the reason (fail under CI) unless engines can be started here."""
    missing = [
        name for name in ("dockerd", "containerd", "ip", "nsenter", "unshare", *programs) if shutil.which(name) is None
    ]
    problem = "user id is not 0" if os.getuid() != 0 else f"not installed: {', '.join(missing)}" if missing else None
    if problem is None:
        return
    reason = f"no engine of our own can be started: {problem}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true needs them)", pytrace=False)
    pytest.skip(reason)


class OwnDockerd:
    """A dockerd with its own socket, data and containerd, in a folder under the temporary folder."""

    def __init__(self, name: str, *, network_of: int | None = None, listen: str | None = None, tls: Path | None = None):
        """``network_of``: process whose network namespace it lives in. ``listen``: a tcp address, with ``tls``."""
        self.name, self.folder = name, folder_in_memory(f"aft-{name}-")
        self.socket = f"unix://{self.folder}/d.sock"
        self.host, self.tls = (listen or self.socket), tls
        # Never in this machine's own network: --bridge=none removes docker0 there, which is another engine's.
        command = ["unshare", "--net"] if network_of is None else ["nsenter", f"--net=/proc/{network_of}/ns/net"]
        command += ["dockerd", "--host", self.socket, "--data-root", f"{self.folder}/data"]
        command += ["--exec-root", f"{self.folder}/exec", "--pidfile", f"{self.folder}/pid"]
        command += ["--bridge=none", "--iptables=false", "--ip-masq=false", "--cgroup-parent", self.folder.name]
        command += ["--config-file", f"{self.folder}/daemon.json"]
        if listen is not None and tls is not None:
            files = ("--tlscacert", tls / "ca.pem", "--tlscert", tls / "server.pem", "--tlskey", tls / "server-key.pem")
            command += ["--host", listen, "--tlsverify", *map(str, files)]
        (self.folder / "daemon.json").write_text("{}")
        self._command = command
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        (self.folder / "pid").unlink(missing_ok=True)
        for file in (self.folder / "exec").glob("containerd/containerd.pid"):
            file.unlink()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            try:
                connect(self.socket).close()
                return
            except Exception:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    pytest.fail(f"dockerd did not start: {(self.folder / 'log').read_text()[-2000:]}")
                time.sleep(0.1)

    def load(self, archive: Path) -> None:
        """Load an image from ``docker save``."""
        with contextlib.closing(connect(self.socket, timeout_s=120)) as client, archive.open("rb") as file:
            client.load_image(file)

    def kill(self) -> None:
        """SIGKILL dockerd and its containerd: from here on the host is gone."""
        for pid in (self._process.pid, *processes_of(self.folder, "containerd")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it and remove every process, mount, control group and file that it made (it keeps nothing elsewhere)."""
        self.kill()
        for shim in processes_of(self.folder, "containerd-shim"):
            for pid in (*children_of(shim), shim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(self.folder), 5)
        remove_folder(self.folder)
        for group in Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}/"):
            for inner in sorted((*group.glob("**/"), group), reverse=True):
                with contextlib.suppress(OSError):
                    inner.rmdir()


@contextlib.contextmanager
def network_namespace() -> Iterator[tuple[int, str]]:
    """Make a network namespace behind a veth pair; gives a process that lives in it and its address."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    outer, inner = f"aft{holder.pid % 100000}o", f"aft{holder.pid % 100000}i"

    def ip(arguments: str, *, inside: bool = False) -> None:
        prefix = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"] if inside else []
        subprocess.run([*prefix, "ip", *arguments.split()], check=True)

    try:
        own = os.readlink("/proc/self/ns/net")
        assert wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, 5)
        ip(f"link add {outer} type veth peer name {inner}")
        ip(f"link set {inner} netns {holder.pid}")
        ip(f"addr add {SUBNET}.1/30 dev {outer}")
        ip(f"link set {outer} up")
        for command in (f"addr add {SUBNET}.2/30 dev {inner}", f"link set {inner} up", "link set lo up"):
            ip(command, inside=True)
        yield holder.pid, f"{SUBNET}.2"
    finally:
        holder.kill()
        holder.wait()
        subprocess.run(["ip", "link", "del", outer], check=False, stderr=subprocess.DEVNULL)


def folder_in_memory(prefix: str) -> Path:
    """Make a folder under /tmp that is a file system in memory: an image's many files are gone with one unmount."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g,mode=0755", "tmpfs", str(folder)], check=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Unmount everything in a folder, and the folder, and remove it."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((point for point in mounts if f"{point}/".startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", point], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def make_certificates(folder: Path, address: str) -> Path:
    """Write an authority, a server's certificate for ``address`` and a client's, as Docker names them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def write(stem: str, key_name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        (folder / f"{stem}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{key_name}.pem").write_bytes(key.private_bytes(*form))

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("aft tests"))
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(days=1)
        )

    authority = ec.generate_private_key(ec.SECP256R1())
    root = builder("aft tests", authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    write("ca", "ca-key", authority, root.sign(authority, hashes.SHA256()))
    for stem, key_name, usage in (
        ("server", "server-key", ExtendedKeyUsageOID.SERVER_AUTH),
        ("cert", "key", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        made = builder(stem, key).add_extension(alternative, critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        write(stem, key_name, key, made.sign(authority, hashes.SHA256()))
    return folder


def wait_until(check: Callable[[], bool], within_s: float) -> bool:
    """Whether ``check`` became true in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.05)
    return check()
