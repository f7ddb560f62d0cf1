"""What README.md and docs/*.md name exists: settings, values, flags, classes and functions."""

import ast
import builtins
import inspect
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer

import hybrid
from hybrid.cli.app import app
from hybrid.settings.config import Config
from hybrid.settings.methods import NAMED, explanations
from hybrid.settings.resolve import load, parse_override
from hybrid.solvers import Links, registry
from hybrid_rl.settings import RlSettings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted({*ROOT.glob("docs/*.md")} - {ROOT / "docs/settings.md"})]
"""All but the page of settings, which is written from the declarations."""
OTHERS = {
    "GraceTime",  # Slurm's
    "BlockTrainer",  # needs transformers, which CI may not have
    "TrainerCallback",  # of transformers
    "TrainingArguments",
    "Dockerfile",
    "hybrid.def",  # files
    "links.kind=counting",  # the page's own links
    "model.safetensors",  # a file
    "section.key=value",
}
OTHERS_FLAGS = {
    "--bind-to",
    "--gpus",
    "--gpus-per-task",
    "--map-by",
    "--max-restarts",
    "--network",
    "--nnodes",
    "--node-rank",
    "--nproc-per-node",
    "--nv",
    "--shm-size",
    "--signal",
    "--standalone",
}
"""Those of mpirun, torchrun, Slurm and containers that stand without their command."""
TORCH = [
    import_module(f"torch{name}")
    for name in (
        *(
            "",
            ".nn",
            ".nn.parallel",
            ".optim",
            ".optim.lr_scheduler",
            ".distributed",
            ".distributed.pipelining",
        ),
        *(".utils.data", ".utils.data.distributed"),
    )
]
GROUP = typer.main.get_command(app)
CONTEXT = typer.Context(GROUP)
FLAGS = {
    name: {"--help"} | {flag for option in command.params for flag in option.opts}
    for name in GROUP.list_commands(CONTEXT)
    if (command := GROUP.get_command(CONTEXT, name))
}
OWNERS = {"solver": registry.OWN, **NAMED}
"""Section -> whose settings it may have."""
WINGS = {"rl": RlSettings}
SECTIONS = {*Config.model_fields, *WINGS}


def blocks(text):
    """The language and the lines of every fenced block."""
    return re.findall(r"^```(\w*).*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def spans(text):
    """What stands in code fonts in the prose of a page."""
    prose = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)} - OTHERS


def commands(text):
    """Every `hybrid COMMAND` with its words, of a page's code and prose."""
    code = "".join(re.findall(r"^    .*\n", text, re.MULTILINE))
    code = "".join([code, *(lines for _, lines in blocks(text))]).replace("\\\n", " ")
    for line in [*code.splitlines(), *spans(text)]:
        for name, words in re.findall(r"(?<![\w./-])hybrid (\w[\w-]*)([^#;|]*)", line):
            if name in FLAGS:
                yield name, words


def named_modules(text):
    """The modules of this package that a page names, and those around them."""
    for name in re.findall(r"(?:from |import |::: |`)((?:hybrid|solvers)(?:[._]\w+)*)", text):
        while name:
            with suppress(ImportError):
                yield import_module(name)
            name = name.rpartition(".")[0]


PUBLIC = {module for page in PAGES for module in named_modules(page.read_text())}


def public(name):
    """The class or function of this name, of a module that the pages name."""
    for module in (*PUBLIC, *TORCH, builtins):
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(f"no class or function {name}")


def check_setting(section, key, value=None):
    """A setting is there, and takes the value with one method at least."""
    head = key.partition(".")[0]
    if section in WINGS:
        if head not in WINGS[section].model_fields:
            raise LookupError(f"no setting {section}.{head}")
        return
    explanations(f"{section}.{head}", {})
    if value in (None, "..."):
        return
    owners = OWNERS.get(section, [""]) if key != "name" else [""]
    refusals = [refusal(section, key, value, owner) for owner in owners]
    if all(refusals):
        raise refusals[0]


def refusal(section, key, value, owner):
    """What is said of a setting of the method, the strategy, ... `owner`; None if it is taken."""
    name = {f"{section}.name": owner} if owner else {}
    try:
        load(None, name | dict([parse_override(f"{section}.{key}={value}")]))
    except ValueError as error:
        return error


def check_call(call):
    """What is called is there, and takes these keywords."""
    name = ast.unparse(call.func)
    if name.split(".")[0] in hybrid.__all__:
        called = resolve_name(f"hybrid.{name}")
    elif re.fullmatch(r"[A-Z]\w*", name):
        called = public(name)
    else:
        return
    takes = inspect.signature(called).parameters.values()
    unknown = {word.arg for word in call.keywords} - {None, *(x.name for x in takes)}
    if unknown and not any(x.kind is x.VAR_KEYWORD for x in takes):
        raise LookupError(f"{name} takes no {unknown}")


def check_span(span):
    """What stands in code fonts is there, if it looks like something of this package."""
    if re.fullmatch(r"(?:hybrid|torch)(?:\.\w+)+", span):
        resolve_name(span)
    elif setting := re.fullmatch(r"(?!torch\.)([a-z_]+)\.([a-z_][\w.]*)(?: ?= ?(.+))?", span):
        section, key, value = setting.groups()
        named = Links if section == "links" else getattr(hybrid, section, None)
        if value or (section in SECTIONS and not hasattr(named, key)):
            check_setting(section, key, value)
    elif (section := re.fullmatch(r"\[([a-z_]+)\]", span)) and section[1] not in SECTIONS:
        raise LookupError(f"no settings {span}")
    elif re.fullmatch(r"[A-Z]+[a-z]{2,}\w*", span):
        public(span)
    elif (flag := re.match(r"--[\w-]+", span)) and flag[0] not in OTHERS_FLAGS.union(
        *FLAGS.values()
    ):
        raise LookupError(f"no command has {flag[0]}")
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(span, mode="eval")):
            if isinstance(node, ast.Call):
                check_call(node)


def check_command(name, words):
    """A command has these flags."""
    if unknown := {*re.findall(r"(?<!\S)--?[a-z][\w-]*", words)} - FLAGS[name]:
        raise LookupError(f"hybrid {name} has no {unknown}")


def check_override(text):
    """What --set gives is a setting with a value that it takes."""
    if text not in OTHERS:
        dotted, _, value = text.partition("=")
        check_setting(*dotted.split(".", 1), value)


def check_imports(code):
    """What an example imports from this package is there."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and re.match("hybrid|solvers", node.module or ""):
            for name in node.names:
                exec(f"from {node.module} import {name.name}", {})


def faults(text):
    """What a page names and is not there, with the reason."""
    checks = [
        *((check_span, [span]) for span in sorted(spans(text))),
        *((check_command, command) for command in commands(text)),
        *((check_override, [x]) for x in re.findall(r"--set '?([a-z_]+\.[^\s'`]+)", text)),
        *((check_imports, [code]) for language, code in blocks(text) if language == "python"),
    ]
    for check, given in checks:
        try:
            check(*given)
        except (LookupError, AttributeError, ImportError, ValueError) as error:
            yield given, error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    assert not [*faults(page.read_text())]


@pytest.mark.parametrize(
    "text",
    [
        "`links.device=ucx`",
        "`links.devise`",
        "`section.gone=1`",
        "`solver.name=gone`",
        "`[gone]`",
        "`EarlyStopping(patience=5)`",
        "`Gone`",
        "`Backprop(parts=4)`",
        "`hybrid.Gone`",
        "`--blokcs`",
        "`hybrid train --seeds 4`",
        "    mpirun -n 2 hybrid train --blocks 2 \\\n        --blokcs 4\n",
        "    hybrid train --set solver.gone=1\n",
        "```python\nfrom hybrid import gone\n```\n",
    ],
)
def test_what_is_not_there_is_found(text):
    assert [*faults(text)]
