"""Addresses of sandbox hosts (floor 1): which are understood, and which would be open to everyone. Pure functions."""

from __future__ import annotations

import re

RAY_AUTO = "ray://auto"
ADDRESSES = f"unix:///path/of/the.sock, tcp://name:port or {RAY_AUTO}"

_PLACE = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):\d{1,5}")
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|\[::1\]")


def host_problem(host: str, tls: object) -> str | None:
    """Return what is wrong with an address, or None. ``tls``: the folder of certificates, if any."""
    scheme, separator, rest = host.partition("://")
    if host == RAY_AUTO or (scheme == "unix" and rest.startswith("/")):
        return None
    place = _PLACE.fullmatch(rest)
    if scheme != "tcp" or not separator or place is None:
        return "not an address of a sandbox host"
    if tls is None and not _LOOPBACK.fullmatch(place["name"]):
        return "plain tcp would give everyone on the network root on that host"
    return None
