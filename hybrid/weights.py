"""Weights as others keep them: one safetensors file, or a folder of shards with an index."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hybrid.files import read_part, read_whole, write_durably

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 1 << 28
"""The largest index that is read."""
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of pickles, in which code could be."""


class Weights:
    """The tensors of a file, or of a folder's files, by name. They are read when they are wanted.

    Files may be links, as in a cache of downloads. ValueError for what is no such file or folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: dict[str, Path] = {}
        """Where each tensor is."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.formats: dict[str, str] = {}
        """As safetensors call them: F32, I8, ..."""
        index = self._find()
        listed = _read_index(index) if index.suffix == ".json" else None
        files = {index} if listed is None else {index.with_name(name) for name in listed.values()}
        for file in sorted(files):
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if listed is None or listed.get(name) == file.name:
                        content = tensors.get_slice(name)
                        self.files[name], self.formats[name] = file, content.get_dtype()
                        self.shapes[name] = tuple(content.get_shape())
        if missing := [name for name in listed or () if name not in self.files]:
            raise ValueError(
                f"weights {index}: {len(missing)} tensors that it lists, {missing[0]!r} first, are "
                "not in its files: copy the folder anew"
            )

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, one at a time; nothing else of their files is read."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for file, names_in_file in by_file.items():
            with _opened(file) as tensors:
                for name in names_in_file:
                    yield name, tensors.get_tensor(name)

    @property
    def all_files(self) -> list[Path]:
        """The files, with their index if they have one."""
        return sorted({self._find(), *self.files.values()})

    def span(self, name: str) -> tuple[int, int]:
        """The first byte of a tensor in its file, and the number of its bytes."""
        head = read_head(self.files[name])
        begin, end = json.loads(head[8:])[name]["data_offsets"]
        return len(head) + begin, end - begin

    def _find(self) -> Path:
        """Find the file, or the index of several."""
        if not self.path.is_dir():
            return self.path
        for name in (FILE, INDEX):
            if (self.path / name).is_file():
                return self.path / name
        for pattern in ("*.safetensors.index.json", "*.safetensors"):
            files = sorted(self.path.glob(pattern))
            if len(files) == 1:
                return files[0]
            if files:
                raise ValueError(
                    f"weights {self.path}: it has {len(files)} files {pattern}: name one of them "
                    f"({files[0].name}, ...)"
                )
        pickled = [name for name in _OTHERS if (self.path / name).exists()]
        how = f"{pickled[0]}, which is code, and no" if pickled else "no"
        raise ValueError(
            f"weights {self.path}: the folder has {how} safetensors file: write one with "
            "save_pretrained, or safetensors.torch.save_model"
        )


def find_names(weights: Weights, model: nn.Module) -> dict[str, str]:
    """Names of a module's parameters and persistent buffers -> those of the tensors to load.

    The names of transformers' base models may have the prefix of the base in one of the two alone.
    Of tied parameters one will do, and is loaded for all. ValueError, with counts, for a tensor
    that is missing, for one that the module has not, unless its class says that it is to be
    ignored, for other shapes, and for tied parameters with unlike values.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    state, tied = model.state_dict(), dict[int, list[str]]()
    for name, x in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(x), []).append(name)
    same = {name: names for names in tied.values() for name in names}

    def stored_name(name: str) -> str | None:
        others = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        return next((each for each in others if each in weights.files), None)

    stored = {name: other for name in state if (other := stored_name(name)) is not None}
    missing = [n for n in state if not any(each in stored for each in same.get(n, [n]))]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_base = bool(prefix) and not hasattr(model, prefix)
    of_base = is_base and any(other != name for name, other in stored.items())
    computed = {stored_name(name) for name, _ in model.named_buffers()}
    strange = [
        name
        for name in weights.files.keys() - {*stored.values()} - computed
        if not (of_base and not name.startswith(f"{prefix}."))  # a head, which the base has not
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    kind, faults = type(model).__name__, list[str]()
    if missing:
        faults.append(f"lacks {len(missing)} of {len(state)} tensors ({missing[0]!r})")
    if strange:
        faults.append(f"has {len(strange)} others ({min(strange)!r})")
    if faults:
        raise ValueError(
            f"weights {weights.path}: not those of {kind}: it {' and '.join(faults)}; give those "
            "of this very class, which its from_pretrained and save_pretrained make of others"
        )
    for name, other in stored.items():
        if weights.shapes[other] != tuple(state[name].shape):
            raise ValueError(
                f"weights {weights.path}: {other!r} has shape {weights.shapes[other]}, and in "
                f"{kind} {tuple(state[name].shape)}: give the weights of the same configuration"
            )
        if _kind(weights.formats[other]) != _kind(str(state[name].dtype)):
            raise ValueError(
                f"weights {weights.path}: {other!r} is {weights.formats[other]}, and in {kind} "
                f"{state[name].dtype}, whose numbers would be others: give weights that are not "
                "quantized, as floating-point numbers"
            )
    for names in tied.values():
        copies = [*dict.fromkeys(stored[name] for name in names if name in stored)]
        for one, other in pairwise(copies):
            (_, first), (_, second) = weights.read([one, other])
            if not torch.equal(first, second):
                raise ValueError(
                    f"weights {weights.path}: {one!r} and {other!r} have unlike values, and are "
                    f"one weight of {kind}: untie them in its configuration, or leave one out"
                )
    return {n: next(stored[each] for each in same.get(n, [n]) if each in stored) for n in state}


def _kind(number_format: str) -> str:
    """float, complex, int or bool, of a name of safetensors' or of torch's."""
    name = number_format.removeprefix("torch.").lower()
    return {"f": "float", "c": "complex", "u": "int", "i": "int"}.get(
        name[0], "bool" if name == "bool" else "float"
    )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> tuple[str, int]:
    """Write a safetensors file, with no copy of all its content; its SHA-256 and its bytes."""
    empty = {name: torch.empty(0, dtype=x.dtype) for name, x in tensors.items()}
    header, size = json.loads(save(empty, metadata)[8:]), 0
    names = [name for name in header if name in tensors]  # in the order of the format
    for name in names:
        header[name]["shape"] = [*tensors[name].shape]
        header[name]["data_offsets"] = [size, size := size + tensors[name].nbytes]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start, digest = len(text).to_bytes(8, "little") + text, hashlib.sha256()

    def parts() -> Iterator[bytes | memoryview]:
        digest.update(start)
        yield start
        for name in names:
            x = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
            part: Any = x.view(-1).view(torch.uint8).numpy()
            digest.update(part)
            yield part

    write_durably(path, parts())
    return digest.hexdigest(), len(start) + size


def write(folder: Path, tensors: Mapping[str, Tensor], most: int) -> None:
    """Write tensors into a folder: one file, or shards of at most `most` bytes and their index.

    A tensor that is larger has a shard of its own.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if shards[-1] and size + x.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += x.nbytes
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / file, {name: tensors[name] for name in names}, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = {"total_size": sum(x.nbytes for x in tensors.values())}
        text = json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True)
        write_durably(folder / INDEX, text + "\n")


def _read_index(path: Path) -> dict[str, str]:
    """The file of every tensor; ValueError for anything else."""
    try:
        listed = json.loads(read_whole(path, MOST_BYTES, links=True))["weight_map"]
        plain = all(isinstance(x, str) and Path(x).name == x for x in listed.values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        plain = False
    if not plain or not listed:
        raise ValueError(f"weights {path}: it is no index of safetensors files: copy it anew")
    return dict(listed)


def read_head(file: Path) -> bytes:
    """What stands before a safetensors file's tensors; all of another file, such as an index."""
    if file.suffix != ".safetensors":
        return read_whole(file, MOST_BYTES, links=True)
    return read_part(file, 0, 8 + int.from_bytes(read_part(file, 0, 8), "little"))


def _opened(file: Path) -> safe_open:
    if not file.is_file():
        what = "it is no regular file" if file.exists() else "there is no such file or folder"
        raise ValueError(f"weights {file}: {what}")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"weights {file}: it is no safetensors file ({error})") from None
    except OSError as error:
        raise ValueError(f"weights {file}: it cannot be read ({error}): copy it anew") from None
