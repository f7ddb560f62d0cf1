"""Settings that methods, strategies and samplers declare, and explanations of all settings."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hybrid.registries import SAMPLERS
from hybrid.settings.config import Config, Section, declared_settings
from hybrid.settings.sections.base import field_docs, first_fault, wrong_kind
from hybrid.solvers import Solver, acting, registry
from hybrid.solvers.acting import nearest
from hybrid.solvers.exact.exact_pass import PassSettings
from hybrid.solvers.named import Named
from hybrid.solvers.registry import LOCAL_METHODS, STRATEGIES

T = TypeVar("T")

NAMED: Mapping[str, Named] = {"fill": LOCAL_METHODS, "sync": STRATEGIES, "sampler": SAMPLERS}
"""Sections besides [solver] whose `name` chooses a class that declares their settings."""
_OWNED: Mapping[str, Named] = {"solver": registry.SOLVERS, **NAMED}


def solver(config: Config) -> Solver:
    """Make the solver named in [solver], with its settings."""
    settings = dict(config.solver)
    return _make(registry.solver_class(settings.pop("name")), "solver", settings)


def correction(config: Config) -> PassSettings:
    """Make the settings of the correction's exact pass."""
    return _make(PassSettings, "correction", config.correction)


def named(config: Config, section: str) -> Any:
    """Make the object that a section of `NAMED` names, with its settings."""
    settings = dict(getattr(config, section))
    return _make(NAMED[section][settings.pop("name")], section, settings)


def values(settings: Any) -> dict[str, Any]:
    """Return the settings of a solver, pass, strategy or sampler."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if f.init}


def _make(cls: type[T], section: str, settings: Mapping[str, Any]) -> T:
    try:
        instance: T = TypeAdapter(cls).validate_python(settings)
    except ValidationError as error:
        raise ValueError(f"{section}.{first_fault(error)}") from None
    for name, value in settings.items():
        if kind := wrong_kind(value, getattr(instance, name, None)):
            raise ValueError(f"{section}.{name} is {value!r}; it must be a valid {kind}")
    return instance


def known_settings(name: str, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return every "section.key" of a run with the solver `name`, and its help.

    `names`: by section of `NAMED`, its name, if that is not the default.
    """
    known = declared_settings()
    for section, owner in {**dict.fromkeys(NAMED, ""), **(names or {}), "solver": name}.items():
        docs = field_docs(declaring(section, owner))
        known |= {f"{section}.{key}": text for key, text in docs.items()}
    return known | {f"correction.{key}": text for key, text in field_docs(PassSettings).items()}


def unknown(dotted: str, name: str, names: Mapping[str, str] | None = None) -> str:
    """Explain that a run with the solver `name` does not have a setting."""
    section, _, key = dotted.rpartition(".")
    if section in _OWNED and (owners := _owners(section, key)):
        chosen = {"solver": name, **(names or {})}.get(section, _OWNED[section].default)
        return (
            f"{dotted} is a setting of {', '.join(owners)}; this run's {section}.name is {chosen}"
        )
    known = known_settings(name, names)
    near = [other for other in known if other.rpartition(".")[2] == key] or sections_of(key)
    near = near or [*filter(None, [nearest(dotted, known)])]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --print-config"
    return f"unknown setting {dotted!r}; {hint}"


def sections_of(key: str) -> list[str]:
    """List every "section.key" with this key, of any solver."""
    anywhere = [*declared_settings(), *(f"correction.{name}" for name in field_docs(PassSettings))]
    places = [dotted for dotted in anywhere if dotted.rpartition(".")[2] == key]
    return places + [f"{section}.{key}" for section in _OWNED if _owners(section, key)]


def _owners(section: str, key: str) -> list[str]:
    """List the solvers, or the names of a section of `NAMED`, that have a setting."""
    owners = []
    for name in _OWNED[section]:
        with suppress(ValueError):  # another package's class may fail to import
            owners += [name] * (key in field_docs(declaring(section, name)))
    return owners


def declaring(section: str, owner: str = "") -> Any:
    """Return the class that declares a section's settings, with a given `name` or the default."""
    if section == "correction":
        return PassSettings
    if section in _OWNED:
        return _OWNED[section][owner or _OWNED[section].default]
    return Config.model_fields[section].annotation if section in Config.model_fields else None


def explanations(setting: str, flags: Mapping[str, str]) -> list[str]:
    """Explain "section.key", or every setting with a key, in a paragraph each.

    `flags`: "section.key" -> its flag. ValueError names the nearest known setting.
    """
    places = [setting] if "." in setting else sections_of(setting)
    paragraphs = [paragraph for place in places for paragraph in _paragraphs(place, flags)]
    if not paragraphs:
        raise ValueError(unknown(setting, registry.DEFAULT))
    return paragraphs


def _paragraphs(dotted: str, flags: Mapping[str, str]) -> Iterator[str]:
    """Write a paragraph for each meaning: solvers may share a key, with different defaults."""
    section, _, key = dotted.partition(".")
    flag = f"\n  also {flags[dotted]}" if dotted in flags else ""
    if section in _OWNED and key == "name":
        default = getattr(Config(), section)["name"]
        yield f"{dotted}: a name, by default {default!r}\n  {declared_settings()[dotted]}{flag}"
        return
    owners: dict[str, list[str]] = {}
    for owner in _owners(section, key) if section in _OWNED else [""]:
        cls = declaring(section, owner)
        if cls is None or key not in field_docs(cls):
            return
        text = f"{dotted}: {_kind(cls, key)}\n  {field_docs(cls)[key]}"
        if where := conditions(section, key, owner):
            text += f"\n  {where}"
        owners.setdefault(text, []).append(owner)
    for text, names in owners.items():
        yield text + (f"\n  of {', '.join(names)}" if names[0] else "") + flag


def conditions(section: str, name: str, owner: str = "") -> str:
    """Describe where a setting acts and where it is allowed, in a sentence each; empty: anywhere.

    `owner` is the name of its solver, strategy or sampler.
    """
    cls = declaring(section, owner)
    if name not in acting.declared(cls):
        return ""
    all_of = acting.conditions(cls, section, name, whole_section=False)
    return " ".join(
        f"It {verb} only where {'; and where '.join(c.where for c in all_of if c.verb == verb)}."
        for verb in dict.fromkeys(condition.verb for condition in all_of)
    )


def _kind(cls: Any, key: str) -> str:
    setting = acting.declared(cls)[key]
    limits = [f"which must {allowed.must}" for allowed in setting.allowed]
    if issubclass(cls, Section):
        limits = [
            f"{word} {getattr(limit, name):g}"
            for limit in cls.model_fields[key].metadata
            for name, word in _LIMITS.items()
            if hasattr(limit, name)
        ]
    default = "unset" if setting.default is None else repr(setting.default)
    return ", ".join([_words(get_type_hints(cls)[key]), *limits, f"by default {default}"])


_LIMITS = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}
"""Limits of numbers in words."""


def _words(kind: Any) -> str:
    """Describe a type: the values of a choice, else its name."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(part) for part in get_args(kind) if part is not NoneType)
    return kind.__name__ if get_origin(kind) is None else str(kind).removeprefix("collections.abc.")
