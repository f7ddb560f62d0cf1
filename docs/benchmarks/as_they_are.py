"""Thirty rows: models, data and optimizers as people have them, trained in two and four blocks.

python docs/benchmarks/as_they_are.py        writes as_they_are.json and prints the table

With names of models: these alone, and all data and optimizers.
"""

import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/support/networks"))

import torch  # noqa: E402
from hugging_face import BATCH, CASES, Rows, data_of, outcome, trainer_of  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler  # noqa: E402

from hybrid.solvers.layers.bundle import call_network  # noqa: E402

SOLVERS = "backprop", "ddg", "augmented-lagrangian"
CASE = CASES["BERT"]


class Stream(IterableDataset):
    """The rows of a data set one after the other."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))

    def __len__(self):
        return len(self.rows)


def uneven(items):
    """Texts cut to the longest of a mini-batch, as a collator does that pads."""
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    longest = max(5, int(batch["attention_mask"].sum(1).max()))
    return {k: x[:, :longest] if x.dim() == 2 else x for k, x in batch.items()}


def streamed_by_datasets(rows):
    from datasets import IterableDataset as Streaming

    def items():
        for i in range(len(rows)):
            yield {key: value.tolist() for key, value in rows[i].items()}

    return Streaming.from_generator(items)


def data():
    from hybrid.data import Stream as Streamed

    rows = Rows(*data_of(CASE))
    weights = torch.linspace(0.1, 1, len(rows)).tolist()
    return {
        "DataLoader, shuffled, with workers": lambda: (
            DataLoader(rows, BATCH, shuffle=True, num_workers=1),
            DataLoader(rows, BATCH),
        ),
        "DataLoader with a WeightedRandomSampler": lambda: (
            DataLoader(rows, BATCH, sampler=WeightedRandomSampler(weights, len(rows))),
            rows,
        ),
        "DataLoader with a collator, lengths that vary": lambda: (
            DataLoader(rows, BATCH, collate_fn=uneven),
            rows,
        ),
        "IterableDataset": lambda: (Stream(rows), rows),
        "datasets, streaming": lambda: (
            Streamed(streamed_by_datasets(rows), samples=len(rows)),
            rows,
        ),
        "no test set": lambda: (rows, None),
    }


def optimizers():
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

    def layer_wise(named):
        rates = {name: 1e-3 * (0.5 if "encoder" in name else 1.0) for name, _ in named}
        return [{"params": [p], "lr": rates[name]} for name, p in named]

    def instance(trainer):
        return AdamW(layer_wise([*trainer.blocks.model.named_parameters()]))

    def scheduled(trainer, make):
        trainer.options.optimizer = instance(trainer)
        trainer.options.schedule = make(trainer.options.optimizer)

    def by_function(trainer):
        trainer.options.optimizer = lambda named_parameters: AdamW(
            layer_wise(named_parameters), lr=1e-3
        )
        trainer.options.schedule = {"name": "linear", "warmup_steps": 3}

    def frozen(trainer):
        update = {"frozen": {"bert.embeddings": 1}, "epochs": 2}
        trainer.options.train = trainer.options.train.model_copy(update=update)

    return {
        "AdamW by layers, LambdaLR each step": lambda t: scheduled(
            t, lambda o: (LambdaLR(o, lambda step: 1 / (1 + step)), "step")
        ),
        "AdamW by layers, OneCycleLR": lambda t: scheduled(
            t, lambda o: OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=6)
        ),
        "AdamW by layers, ReduceLROnPlateau": lambda t: scheduled(
            t, lambda o: (ReduceLROnPlateau(o, patience=0), "loss")
        ),
        "a function of named parameters, warm-up in steps": by_function,
        "embeddings frozen for an epoch": frozen,
    }


def exported(name):
    """Whether `from_pretrained` of what was exported gives what the trained network gives."""
    import hybrid

    case = CASES[name]
    network = case.build()
    if not hasattr(network, "save_pretrained") or not hasattr(network.config, "to_dict"):
        return "yes"
    inputs, targets = data_of(case)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run, written = Path(folder, "run"), Path(folder, "written")
            trainer = trainer_of(case, 2, "backprop", out=run)
            trainer.fit(Rows(inputs, targets))
            hybrid.export(run, written, model=network)
            again = type(network).from_pretrained(written).eval()
        with torch.no_grad():
            one, other = (
                call_network(model.eval(), inputs) for model in (trainer.blocks.model, again)
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    return "yes" if all(a.equal(b) for a, b in tensors) else "outputs differ"


def trained(solver, blocks, sets, change):
    trainer = trainer_of(CASE, blocks, solver)
    change(trainer)
    trainer.fit(*sets())
    return dict(trainer.blocks.model.state_dict())


def equal_weights(sets, change=lambda trainer: None):
    """ "yes", or what differs between two and four blocks and one, or fails."""
    try:
        for solver in SOLVERS:
            if solver == SOLVERS[-1] and sets is VARYING:
                continue  # stored variables have one shape: refused with that reason
            weights = [trained(solver, K, sets, change) for K in (1, 2, 4)]
            others = [n for n, x in weights[0].items() if any(not x.equal(w[n]) for w in weights)]
            if solver == SOLVERS[0] and others:
                return f"{len(others)} tensors differ from those of one block"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "yes"


VARYING = None


def main():
    global VARYING
    rows = {}

    def note(kind, name, answer, begun):
        rows[f"{kind}: {name}"] = {"answer": answer, "seconds": round(perf_counter() - begun, 1)}
        print(f"| {kind} | {name} | {answer} |", flush=True)
        (HERE / "as_they_are.json").write_text(json.dumps(rows, indent=1))

    for name in sys.argv[1:] or CASES:
        begun = perf_counter()
        answers = {"export": exported(name)}
        answers |= {f"{s}, K = {k}": outcome(name, k, s) for s in SOLVERS for k in (2, 4)}
        wrong = [f"{where}: {answer}" for where, answer in answers.items() if answer != "yes"]
        note("model", name, "; ".join(wrong) or "yes", begun)
    for name, sets in data().items():
        begun = perf_counter()
        VARYING = sets if "vary" in name else None
        note("data", name, equal_weights(sets), begun)
    whole = Rows(*data_of(CASE))
    for name, change in optimizers().items():
        begun = perf_counter()
        note("optimizer", name, equal_weights(lambda: (whole, whole), change), begun)
    yes = sum(row["answer"] == "yes" for row in rows.values())
    print(f"{yes} of {len(rows)} yes")


if __name__ == "__main__":
    main()
