"""The file of a checkpoint (floor 5): safetensors, with everything that is no tensor as JSON in the header.

    write_checkpoint(path, {"state": {...}, "rng": [...]})   # at once and whole, or not at all
    content = read_checkpoint(path)                          # equal to what was written

Nothing is ever unpickled: a checkpoint may come from anywhere. Composer's own checkpoints are pickles, loaded with
``weights_only=False``, which runs whatever the file says; ``composer_reads_these()`` makes it read these files instead.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentft.data.storage import disk_errors
from agentft.errors import CheckpointError
from agentft.files import whole_file

FORMAT = "agentft.checkpoint/1"
ALIGNMENT = 64
"""Bytes at whose multiple the data begins; readers map the file into memory."""

_TAG = "~"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_checkpoint(path: Path, content: Mapping[str, Any]) -> tuple[int, str]:
    """Write ``content``; return size in bytes and SHA-256. The file appears whole, and is on disk, or not at all.

    Args:
        path: Where to; an existing file is replaced.
        content: Nested dicts, lists, tuples, sets and deques of tensors, arrays and plain values.

    Raises:
        CheckpointError: Something in ``content`` is none of these; says where.
        StorageError: The disk is full.
    """
    tensors: dict[str, Tensor] = {}
    body = json.dumps(_encode(content, "", tensors, {}))
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # each at a multiple of its size
    with disk_errors(path), whole_file(path) as partial, partial.open("wb") as file:
        size, digest = _write(file, tensors, body)
        file.flush()
        os.fsync(file.fileno())
    return size, digest


def read_checkpoint(path: Path, *, copy: bool = True) -> dict[str, Any]:
    """Return the content of a checkpoint.

    Args:
        path: The file.
        copy: Give every tensor memory of its own. Without it tensors lie in the mapped file, whose alignment may make
            kernels round differently: for what is copied anyway, such as the shards of FSDP.

    Raises:
        CheckpointError: It is missing, damaged or no checkpoint of this kind (such as a pickle).
    """
    with _opened(path) as file:
        body = _body(path, file)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if copy:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    decoded = _decode(body, tensors)
    assert isinstance(decoded, dict)
    return decoded


def read_plain(path: Path, key: str) -> Any:
    """Return ``content[key]``, which holds no tensors, without reading the tensors of the file.

    Raises:
        CheckpointError: As ``read_checkpoint``.
    """
    with _opened(path) as file:
        return _decode(_body(path, file).get(key), {})


def strip_optimizer(path: Path) -> tuple[int, str]:
    """Rewrite a checkpoint without the optimiser's state; return its size in bytes and SHA-256."""
    content = read_checkpoint(path, copy=False)
    content["state"].pop("optimizers", None)
    return write_checkpoint(path, content)


@contextmanager
def composer_reads_these(*, copy: bool = True) -> Iterator[None]:
    """Let Composer's ``load_path`` read these files, and nothing else, while a ``Trainer`` is built."""
    from composer.utils import checkpoint

    def read(checkpoint_filepath: str | Path, map_location: str) -> dict[str, Any]:
        return read_checkpoint(Path(checkpoint_filepath).resolve(), copy=copy)

    theirs = checkpoint._torch_load_with_validation
    checkpoint._torch_load_with_validation = read
    try:
        yield
    finally:
        checkpoint._torch_load_with_validation = theirs


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError("no checkpoint here", where=str(path)) from None
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(
            "not a checkpoint, or a damaged one",
            where=str(path),
            got=f"{_kind(path)} ({cause})",
            expected="a safetensors file that a run has written",
            hint="pickles are never loaded: they can run any program. Remove the file, or resume from another one",
        ) from None


def _body(path: Path, file: Any) -> dict[str, Any]:
    about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise CheckpointError(
            "not a checkpoint of this version", where=str(path), got=about.get("format"), expected=FORMAT
        )
    body = json.loads(about["content"])
    assert isinstance(body, dict)
    return body


def _kind(path: Path) -> str:
    start = path.open("rb").read(4) if path.is_file() else b""
    if start[:2] == b"PK":
        return "a zip archive, as torch.save writes them"
    return "a pickle" if start[:1] == b"\x80" else "something else"


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], body: str) -> tuple[int, str]:
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "content": body}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest, size = hashlib.sha256(), 8 + len(text) + end
    for piece in (len(text).to_bytes(8, "little"), text):
        digest.update(piece)
        file.write(piece)
    for tensor in tensors.values():  # one at a time: a second copy of everything would not fit into memory
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        flat = flat.as_strided((len(flat),), (1,)) if len(flat) < 2 else flat  # one element may have any stride
        data = flat.view(torch.uint8).numpy().data
        digest.update(data)
        file.write(data)
    return size, digest.hexdigest()


def _encode(value: Any, path: str, tensors: dict[str, Tensor], seen: dict[tuple[Any, ...], str]) -> Any:
    """Return ``value`` as JSON; tensors go to ``tensors`` under their path, one that is met twice only once."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", "v": str(float(value))}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if value is None:
        return None
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "v": _keep(value, path, tensors, seen)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TAG: "array", "v": _keep(torch.from_numpy(np.ascontiguousarray(value)), path, tensors, seen)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _encode(value.item(), path, tensors, seen)
    if isinstance(value, bytes):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, f"{path}/{key}", tensors, seen)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and _TAG not in value:
            return {str(key): item for key, item in pairs}
        return {_TAG: "dict", "v": [[_encode(key, path, tensors, seen), item] for key, item in pairs]}
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            parts = [_encode(item, f"{path}/{row}", tensors, seen) for row, item in enumerate(items)]
            return parts if kind is list else {_TAG: kind.__name__, "v": parts}
    raise CheckpointError(
        "the state of this run cannot be saved",
        where=path.lstrip("/"),
        got=f"an object of {type(value).__module__}.{type(value).__qualname__}",
        expected="tensors, arrays, numbers, texts, and lists and dicts of them",
    )


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor], seen: dict[tuple[Any, ...], str]) -> str:
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        raise CheckpointError("a tensor of this kind cannot be saved", where=path.lstrip("/"), got=str(tensor.dtype))
    place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
    if tensor.numel() and place in seen:
        return seen[place]
    name = path.lstrip("/")
    tensors[name] = tensor
    seen[place] = name
    return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind, content = value[_TAG], value["v"]
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "timedelta":
        return timedelta(*content)
    several: dict[str, Callable[[Iterator[Any]], Any]]
    several = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
    return several[kind](_decode(item, tensors) for item in content)
