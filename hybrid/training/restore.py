"""Run folders read again: the network of a run's newest checkpoint."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from hybrid import weights
from hybrid.data import NAMES, Data, Sets, Texts, reference
from hybrid.errors import given_by, one_line
from hybrid.files import whole_folder, write_atomically
from hybrid.folder import checkpoint
from hybrid.folder.checkpoint import best as best_of
from hybrid.folder.runfolder import RunFolder
from hybrid.networks import local_init, models
from hybrid.networks.partition.split import split
from hybrid.registries import TEXT
from hybrid.settings import resolve
from hybrid.settings.config import Config, DataSettings
from hybrid.settings.sections.base import LARGE
from hybrid.solvers.named import is_reference
from hybrid.training import build, references
from hybrid.training.summary import OWN_LOSS
from hybrid.training.trainer import Trainer

Model = nn.Module | Callable[[], nn.Module] | str
"""A network, or a function that builds it, or the function's name, package.module:function."""
START = b"\n"
"""What stands before a text that begins with nothing."""
EXPORTED = r"(.*config\.json|.*\.safetensors(\.index\.json)?|README\.md)"
"""The names of the files in a folder that may be an older export."""
CHANCES = 20
"""Checkpoints that may be removed while they are read."""
_MODEL = "model=, the network or a function that makes it"
_OTHER_FORMATS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".h5", ".onnx", ".gguf", ".npz")


def evaluate(
    run: Path, *, loss: str | None = None, best: bool = False, **options: str | None
) -> tuple[dict[str, dict[str, float]], Path]:
    """Loss and metrics of a run's newest (or best) checkpoint, by set; and its folder.

    Measures on the validation set, if there is one, and on the test set, on one device.
    `loss` is package.module:function, or the name of a loss; `options` are as in `restore`.
    """
    settings, folder, network, loaded = restore(run, best=best, **options)
    sets = {"validation": loaded.validation, "test": loaded.test}
    measured = {name: data for name, data in sets.items() if data is not None}
    if not measured:
        raise ValueError(
            f"the data of {run} have no validation or test set: give --data "
            "package.module:function, which gives (training, test) data"
        )
    train = settings.train
    name = _choose(run, "--loss", train.loss, loss, train.loss != OWN_LOSS)
    function = references.load_loss(name)
    train = train.model_copy(update={} if function else {"loss": name})
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # keys and values of earlier tokens, which no loss takes
    trainer = Trainer(split(network, 1), train=train, loss=function)
    return {name: trainer.evaluate(data) for name, data in measured.items()}, folder


def load(
    run: str | Path, model: Model | None = None, *, data_dir: str | None = None, best: bool = False
) -> nn.Module:
    """The network of a run's newest (or best) checkpoint, on the CPU, in evaluation mode.

    `model` is a network like the run's, or what makes one; its weights are replaced. If it is None,
    the run's settings make a network of this package, from data that may have moved to `data_dir`.
    ValueError if they cannot, or if the run holds another model.
    """
    settings = _settings(Path(run))
    if model is not None:
        network = _user_network(model, settings)
        return _load_weights(network, read_weights(Path(run), best), "model=", settings).eval()
    if settings.data.name == TEXT:  # a network that needs no text
        return _restore_network(Path(run), settings, None, None, best)[0].eval()
    return restore(Path(run), data_dir=data_dir, best=best)[2].eval()


def restore(
    run: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    data_dir: str | None = None,
    best: bool = False,
) -> tuple[Config, Path, nn.Module, Sets]:
    """A run's settings, its checkpoint, the network of that on the CPU, and its data.

    `model` and `data` are package.module:function and make the user's own network and data;
    `data_dir` is where this package's data have moved. ValueError if one is missing.
    """
    settings = _settings(run)
    name = settings.data.name
    available = name in NAMES or bool(reference(name))
    updates: dict[str, Any] = {"name": _choose(run, "--data", name, data, available)}
    if not settings.data.validation:  # a share is drawn from the samples that were taken
        updates["limit"] = 0
    if data_dir is not None:
        updates["dir"] = data_dir
    data_settings = settings.data.model_copy(update=updates)
    if data not in (None, name):  # settings of the run's data need not hold for others
        data_settings = DataSettings.of("data", updates)
    sets = build.load_all_sets(data_settings, settings.train.loss, settings.train.seed)
    network, folder = _restore_network(run, settings, model, sets.train, best)
    return settings, folder, network, sets


def generate(
    run: str | Path,
    prompt: bytes = b"",
    *,
    temperature: float = 0.8,
    seed: int = 0,
    model: str | None = None,
    best: bool = False,
) -> Iterator[int]:
    """The bytes that follow a prompt, one by one without an end, from a run's newest checkpoint.

    Each is drawn from softmax(logits / temperature), given at most `data.length` bytes before it;
    at temperature 0 it is the likeliest one. The same seed gives the same text. `model` and `best`
    are as in `restore`. ValueError for a run on other data than text, or a temperature below 0.
    """
    if not 0 <= temperature < inf:
        raise ValueError(f"temperature is {temperature:g}: it must be 0 or above, and finite")
    settings = _settings(Path(run))
    if settings.data.name != TEXT:
        raise ValueError(
            f"{run} was trained on {settings.data.name}, and only runs trained on text can generate"
        )
    length = settings.data.length
    network = _restore_network(Path(run), settings, model, None, best)[0].eval()
    draws = torch.Generator().manual_seed(seed)

    def following() -> Iterator[int]:
        text = torch.tensor([[*(prompt or START)]])
        while True:
            with torch.no_grad():
                logits = network(text[:, -length:])[0, :, -1].double()
            byte = _draw(logits, temperature, draws)
            yield int(byte)
            text = torch.cat((text, byte.view(1, 1)), dim=1)[:, -length:]

    return following()


def _draw(logits: Tensor, temperature: float, draws: torch.Generator) -> Tensor:
    """A class of softmax(logits / temperature), int64 (1,)."""
    if not logits.isfinite().all():
        raise ValueError("the network gives no finite numbers: it has diverged, so train it anew")
    if temperature == 0:
        return logits.argmax(0, keepdim=True)
    # the largest becomes 0, since quotients by a small temperature overflow
    p = ((logits - logits.max()) / temperature).softmax(0)
    return torch.multinomial(p, 1, generator=draws)


def _restore_network(
    run: Path, settings: Config, model: str | None, samples: Data | None, best: bool
) -> tuple[nn.Module, Path]:
    """The network of a run's checkpoint, and that; the network is made for `samples`."""
    stored = settings.model.name
    available = is_reference(stored) or bool(models.NAME.fullmatch(stored))
    name = _choose(run, "--model", stored, model, available)
    if is_reference(name):
        network = _user_network(name, settings)
    elif model is not None:
        raise ValueError(f"--model is {model}: give package.module:function, or leave it out")
    else:
        if samples is None or settings.data.name == TEXT:  # the length is the run's
            samples = Texts.empty(settings.data.length)
        network = build.build_model(settings, samples)
    loaded = read_weights(run, best)
    where = f"{run / 'config.toml'}" if model is None else f"--model {model}"
    return _load_weights(network, loaded, where, settings), loaded.folder


def export(
    run: str | Path,
    target: str | Path,
    model: Model | None = None,
    *,
    best: bool = False,
    shard_gb: float | None = None,
) -> None:
    """Write the composed network of a run's newest (or best) checkpoint, whole or not at all.

    A `target` *.safetensors is a file of the state dict. Any other is a folder: model.safetensors,
    or shards of at most `shard_gb` 10^9 bytes (None: 5) with their index. With `model`, what made
    the network, or one like it, a class that can save itself, such as transformers', does so in its
    own way, with its config.json. An older export is replaced.

    ValueError for a name that promises another format, and for a folder with other things.
    """
    run, target = Path(run), Path(target)
    file = target.suffix == ".safetensors"
    if not file and (".safetensors" in target.name or target.suffix in _OTHER_FORMATS):
        raise ValueError(
            f"{target} would be a safetensors file under another name, which torch.load refuses: "
            f"write {target.with_suffix('.safetensors').name}, or name a folder"
        )
    if file and not (model is None and shard_gb is None):
        raise ValueError(
            f"{target} is one file of weights, without shards or a configuration: name a folder, "
            f"or leave {given_by('--model and --shard-gb', 'model= and shard_gb=')} out"
        )
    size = 5.0 if shard_gb is None else shard_gb
    if not 1e-9 <= size <= LARGE:
        raise ValueError(
            f"{given_by('--shard-gb', 'shard_gb')} is {size:g}: it must be above 0, such as 5"
        )
    most = int(1e9 * size)
    stored = read_weights(run, best)
    if stored.frozen and model is None:
        raise ValueError(
            f"{stored.folder} leaves out {len(stored.frozen)} frozen weights, which {target} would "
            f"lack: name a folder, and give {given_by('--model package.module:function', _MODEL)}"
        )
    if file:
        content = {k: v.contiguous() for k, v in stored.tensors.items()}
        write_atomically(target, save(content, {"model": stored.model}))
        return
    with whole_folder(target, EXPORTED) as partial:
        if model is None:
            weights.write(partial, stored.tensors, most)
            return
        settings = _settings(run)
        network = _user_network(model, settings)
        _save_itself(_load_weights(network, stored, "model=", settings), partial, most)


def _save_itself(network: nn.Module, folder: Path, most: int) -> None:
    """Write a network as its class does, or else its state dict."""
    save_pretrained = getattr(network, "save_pretrained", None)
    if not callable(save_pretrained):
        weights.write(folder, network.state_dict(), most)
        return
    try:
        save_pretrained(folder, max_shard_size=most)
    except OSError:
        raise
    except Exception as error:  # whatever a class of others raises
        raise ValueError(
            f"{type(network).__name__}.save_pretrained failed: {type(error).__name__}: "
            f"{one_line(error)}"
        ) from None


def _user_network(model: Model, settings: Config) -> nn.Module:
    """Return a network, or the one that a function builds; ValueError for anything else.

    It has no memory if package.module:function makes it and a run's weights came from a file.
    """
    if isinstance(model, str):
        with local_init.without_weights() if settings.model.weights else nullcontext():
            return references.make_network(model)
    network = model if isinstance(model, nn.Module) else model()
    if not isinstance(network, nn.Module):
        raise ValueError(f"model gave a {type(network).__name__}, not a torch.nn.Module")
    return network


def _choose(run: Path, flag: str, stored: str, name: str | None, available: bool) -> str:
    """The name of a flag, or else the stored one, unless it is a script's or would run code."""
    if name is None and not available:
        option = given_by(f"{flag} package.module:function, one like it", _MODEL)
        raise ValueError(f"{run} was made with your own {flag[2:]} ({stored}): give {option}")
    if name is None and is_reference(stored):
        option = given_by(f"{flag} {stored} again", _MODEL)
        raise ValueError(f"{run} was made with {stored}, code that would run: give {option}")
    return name or stored


class CheckpointWeights(NamedTuple):
    """The weights of a checkpoint."""

    folder: Path
    model: str
    """The network's name."""
    tensors: dict[str, Tensor]
    frozen: checkpoint.References
    """What is known of the weights that it leaves out."""


def _load_weights(
    network: nn.Module, stored: CheckpointWeights, where: str, settings: Config
) -> nn.Module:
    """The network, with the weights of a checkpoint, and of those that it leaves out its own."""
    if any(x.is_meta for x in network.state_dict().values()):
        file = settings.model.weights if stored.frozen else None
        pending = file and local_init.find_pending_weights(network, file)
        local_init.lay_zeros(network)
        local_init.lay_under(network, torch.empty_like)
        if pending:  # tied weights may have one name there
            names = {pending.names[n]: n for n in stored.frozen if n in pending.names}
            for name, x in pending.weights.read(names):
                network.state_dict()[names[name]].copy_(x)
    own = {n: x for n, x in network.state_dict().items() if n in stored.frozen}
    found = {name: checkpoint.reference(x) for name, x in own.items()}
    checkpoint.check_left_out(stored.folder, stored.frozen, found)
    try:
        loaded = network.load_state_dict(stored.tensors, strict=not stored.frozen)
        if others := [*loaded.unexpected_keys, *({*loaded.missing_keys} - {*own})]:
            raise RuntimeError(f"it has others: {', '.join(others)}")
    except RuntimeError as error:
        raise ValueError(
            f"{stored.folder} is not of the model that {where} describes: put back what it was "
            f"trained with ({' '.join(str(error).split())[:200]})"
        ) from None
    return network


def _settings(run: Path) -> Config:
    """The settings of a run."""
    folder = RunFolder(run)
    # one that goes on may remove the checkpoint that was found
    none = all(folder.newest() is None for _ in range(CHANCES))
    if none or not os.path.lexists(run / "config.toml"):
        raise ValueError(f"{run} is not a run folder with a checkpoint")
    return resolve.load(None, {}, base=run / "config.toml")


def read_weights(run: Path, best: bool) -> CheckpointWeights:
    """The weights of a run's newest or best checkpoint.

    A run that goes on removes checkpoints while they are read: then the next one is.
    """
    settings = _settings(run)
    for _ in range(CHANCES):
        folder = _best(run, settings) if best else RunFolder(run).newest()
        try:
            if folder is not None:
                manifest = checkpoint.read_manifest(folder)
                tensors, frozen = checkpoint.load_model(folder, manifest), manifest["frozen"]
                return CheckpointWeights(folder, manifest["model"], tensors, frozen)
        except (ValueError, FileNotFoundError):
            if folder is not None and (folder / checkpoint.MANIFEST).is_file():
                raise
    raise ValueError(f"{run} replaces its checkpoints faster than they can be read: copy one of it")


def _best(run: Path, settings: Config) -> Path:
    """A run's best checkpoint."""
    keep = settings.checkpoint
    if not keep.best and keep.keep_last:
        raise ValueError(
            f"{run} kept its newest {keep.keep_last} checkpoints, not the best one: leave out "
            f"{given_by('--best', 'best=True')}, or train with checkpoint.best=true"
        )
    whole = checkpoint.complete(RunFolder(run).checkpoints)
    folder = best_of(whole, settings.train.selection)
    if folder is None:
        raise ValueError(
            f"{run} has no checkpoint of weights that were measured: leave out "
            f"{given_by('--best', 'best=True')}, or train to the end of an epoch that "
            "train.evaluate_every and checkpoint.every share"
        )
    return folder
