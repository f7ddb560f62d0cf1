"""Settings that are valid but for a few hostile changes, as flags, --set and TOML."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w
from hypothesis import strategies as st

from hybrid.settings.config import Config
from hybrid.settings.methods import known_settings
from hybrid.solvers import Backprop, registry

KEYS = sorted({key for solver in registry.OWN for key in known_settings(solver)})
FLAGS = {
    "--model": ["resnet8", "resnet20", "wrn-10-1", "resnet18", "wrn-1996-999"],
    "--data": ["digits", "cifar10", "cifar-10"],
    "--solver": sorted(registry.OWN),
    "--epochs": ["1", "0", "-1", "1e3", "99999999999999999999"],
    "--batch-size": ["64", "1", "0", "1437", "1438", "99999999999999999999999"],
    "--lr": ["0.1", "0", "nan", "inf", "-inf", "1e-320", "1e400", "0x1p3"],
    "--window": ["4", "all", "0", "-4", "--4", "4.0", "²", "99999999999999999999", "१"],
    "--sweeps": ["0", "1", "3", "-1", "999999999999999999999999"],
    "--blocks": ["1", "2", "5", "6", "0", "-1", "999999999999999999999999"],
    "--seed": ["0", "-1", "2147483647", "2147483648"],
    "--precision": ["float32", "bfloat16", "float8"],
    "--data-dir": ["", "/", "/dev/null", "/proc/self/mem", "\0", "x" * 5000, "~", "~nobody-here"],
    "--out": ["", "/", "/dev/null", "/dev/null/x", "/proc/x", "\0", "x" * 300, "a\nb", "\udcff"],
    "--set": ["", "=", ".=", "a.=1", "train.epochs", "train.epochs==", "x.y.z=1", "train={}"],
}
NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 10**4299, True, False),
    *(0.0, -0.0, 0.5, 1.0, 1e-308, 5e-324, 1e308, -1e308),
    *(float("nan"), float("inf"), -float("inf")),
]
WORDS = [
    *("", " ", "auto", "all", "none", "float32", "bfloat16", "float16", "int8", "digits", "cpu"),
    *("cuda", "sgd", "adamw", "cosine", "step", "layer1.0", "layer2.0", "layer3.0", "head", "stem"),
    *("layer2.0:4", "coupling", "average", "even", "virtual", "added", "own", "identity"),
    *("\0", "\n", "\x1b[2J", "\u202e", "é", "\U0001d518" * 50),
    *("x" * 10_000, "{}", "%s", "../../x", "-1"),
    *registry.OWN,
]

numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
words = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
usable = words.filter(lambda word: not word.startswith("/"))
values = st.recursive(
    numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def _choices() -> dict[str, list[Any]]:
    """Plausible values of every setting: each may be right by itself."""
    annotated = {
        f"{section}.{key}": info.annotation
        for section, part in Config.model_fields.items()
        if hasattr(part.annotation, "model_fields")
        for key, info in part.annotation.model_fields.items()
    }
    for cls in (Backprop, *map(registry.solver_class, registry.OWN)):
        hints = get_type_hints(cls)
        for section in ("solver", "correction"):
            annotated |= {f"{section}.{f.name}": hints[f.name] for f in fields(cls) if f.init}
    named = {
        "model.name": FLAGS["--model"],
        "data.name": FLAGS["--data"],
        "optimizer.name": ["sgd", "AdamW", "RMSprop", "Rprop", "Muon", "LBFGS"],
        "optimizer.arguments": [{}, {"eps": 1e-6}, {"maximize": True}, {"betas": [0.5, 2]}],
        "schedule.name": ["cosine", "step", "one-cycle", "ExponentialLR", "CyclicLR", "LambdaLR"],
        "schedule.arguments": [{}, {"gamma": 0.9}, {"base_lr": 0.1}, {"total_steps": 2}],
        "schedule.interval": ["epoch", "step"],
        "data.dir": ["", "/nowhere"],
        "solver.name": sorted(registry.OWN),
        "split.cuts": [[], ["layer2.0"], ["layer2.0", "head"], ["head", "layer2.0"], ["stem"]],
        "rounds.local_budget": [[], [[64, 0], [0, 16]], [[0, 0]], [[1, 1], [1, 1]]],
        "rounds.window": [1, 4, 1000, "all"],
    }
    return {key: named.get(key) or _of(annotated.get(key)) for key in KEYS}


def _of(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if hint is bool:
        return [True, False]
    return [0.5, 0.1, 1.0, 2.0] if hint is float else [1, 2, 4, 8]


CHOICES = _choices()
plausible = st.sampled_from(KEYS).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(CHOICES[key]))
)
hostile = st.tuples(st.sampled_from(KEYS) | words, values)
# seven in eight tables are of plausible values, which may contradict each other
settings_tables = st.integers(0, 7).flatmap(
    lambda which: st.lists(plausible | hostile if which == 0 else plausible, max_size=5)
)


@st.composite
def toml_texts(draw: st.DrawFn) -> bytes:
    """A file of settings: a valid form of wrong values, at times with broken bytes."""
    tree: dict[str, Any] = {}
    for dotted, value in draw(settings_tables):
        section, _, key = dotted.partition(".")
        tree.setdefault(section, {})[key] = value
    if draw(st.integers(0, 9)) == 0:
        tree[draw(words)] = draw(values)
    text = bytearray(_toml(tree, "").encode())
    if draw(st.integers(0, 9)) == 0:
        for place, piece in draw(st.lists(st.tuples(st.integers(0, 500), st.binary(max_size=4)))):
            text[place : place + len(piece)] = piece
    return bytes(text)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """The words after `hybrid train`, but for CONFIG and --out; they start nothing large."""
    line: list[str] = []
    for flag in draw(st.lists(st.sampled_from(sorted(FLAGS)), max_size=3)):
        line += [flag, draw(st.sampled_from(FLAGS[flag]))]
        if draw(st.integers(0, 19)) == 0:
            line[-1] = draw(usable)
    for dotted, value in draw(settings_tables):
        text = _toml({"v": value}, f"v={str(value)[:1000]}").partition("=")[2].strip()
        line += ["--set", f"{dotted}={text}"]
    if draw(st.integers(0, 9)) == 0:
        line.append(draw(usable | st.sampled_from(["--resume", "--nope", "-x"])))
    return line


def _toml(tree: dict[str, Any], otherwise: str) -> str:
    try:
        return tomli_w.dumps(tree)
    except (ValueError, TypeError):
        return otherwise
