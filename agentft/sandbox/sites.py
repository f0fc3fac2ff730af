"""One host of several (floor 2): what ``HostPool`` asks of it, a Docker engine as such, and when two are alike.

``ray_pool.RaySite`` is the other kind of host.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from agentft.errors import SandboxError
from agentft.sandbox.base import Lease, Limits
from agentft.sandbox.pool import Pool, Reuse

CLOSED = "closed"
"""Why a container is broken that we ended ourselves (``Container.close``): not a failure of the host."""

log = logging.getLogger(__name__)


class Site(Protocol):
    """One host that is there: a pool of leases on it."""

    image_digest: str
    recipe: str
    """Label of how the image was made, or empty."""

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold one clean container of this host. Raises ``SandboxError``."""

    def answers(self) -> bool:
        """Whether the host's engine is alive; decided within seconds."""

    def close(self) -> None:
        """Give back what is held there, also where the host is gone. Idempotent."""


class DockerSite:
    """A pool on one Docker engine. Meets ``Site``."""

    def __init__(
        self,
        host: str,
        *,
        image: str,
        workers: int,
        limits: Limits,
        run_name: str,
        tls: Path | str | None = None,
        runtime: str | None = None,
        reuse: Reuse = "session",
    ) -> None:
        """Connect and start ``workers`` containers, a few at a time.

        Raises:
            HostAwayError: no engine answers there.
            SandboxError: the image or the runtime is missing, or the certificates are refused.
        """
        from agentft.sandbox.docker import DockerEngine

        self._engine = DockerEngine(image=image, limits=limits, run_name=run_name, host=host, tls=tls, runtime=runtime)
        self.image_digest, self.recipe = self._engine.image_digest, self._engine.recipe
        self._pool = Pool(self._engine, workers, reuse=reuse)

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold one clean container of this host."""
        return self._pool.lease()

    def answers(self) -> bool:
        """Whether the engine is alive."""
        return self._engine.answers()

    def close(self) -> None:
        """End the containers."""
        self._pool.close()


def check_same_image(one: tuple[str, Site], other: tuple[str, Site]) -> None:
    """Return if both hosts have the same image, by id or by recipe.

    Raises:
        SandboxError: they have not; names both hosts and both images.
    """
    (name, site), (other_name, other_site) = one, other
    if site.image_digest == other_site.image_digest:
        return
    if site.recipe and site.recipe == other_site.recipe:
        log.warning(
            "the images on %s and %s were built apart by the same recipe: package versions may differ",
            name,
            other_name,
        )
        return
    raise SandboxError(
        "the sandbox hosts have different images",
        got=f"{name}: {site.image_digest[:26]} (recipe {site.recipe or 'unknown'}); "
        f"{other_name}: {other_site.image_digest[:26]} (recipe {other_site.recipe or 'unknown'})",
        expected="one image everywhere",
        hint="copy it: docker save IMAGE | docker --host HOST load",
    )
