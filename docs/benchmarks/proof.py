"""The proof of a run: right networks of the table "as they are" pass it, and what it costs.

python docs/benchmarks/proof.py rows                 threads: writes proof.json, prints a line each
mpirun -n 2 python docs/benchmarks/proof.py rows     two ranks; torchrun --nproc-per-node 2 likewise
python docs/benchmarks/proof.py cost                 seconds of the proof beside those of a step
"""

import json
import sys
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/support/networks"))
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from as_they_are import CASE, data, optimizers  # noqa: E402
from hugging_face import CASES, Rows, data_of, trainer_of  # noqa: E402
from torch import nn  # noqa: E402
from zoo_packages import package  # noqa: E402

from hybrid import Trainer, split  # noqa: E402
from hybrid.networks import models  # noqa: E402
from hybrid.ranks import launch  # noqa: E402
from hybrid.solvers import DDG, Backprop  # noqa: E402
from hybrid.training import run  # noqa: E402

RECORD = HERE / "proof.json"
SPENT = []


def timed(*arguments, prove=run.prove):
    begun = perf_counter()
    try:
        return prove(*arguments)
    finally:
        SPENT.append(perf_counter() - begun)


def note(table, row, answer):
    """A row of the record, which the first rank writes."""
    if (job := launch.ranks()) is not None and job.comm.rank:
        return
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record.setdefault(table, {})[row] = answer
    RECORD.write_text(json.dumps(record, indent=1))
    print(f"| {row} | {answer} |", flush=True)


def answer(trainer, *sets):
    """What the run says of its proof, and the seconds of it."""
    trainer.options.train = trainer.options.train.model_copy(
        update={"verify": "always", "epochs": 1}
    )
    SPENT.clear()
    try:
        proof = trainer.fit(*sets)["proof"]
    except ValueError as error:
        proof = str(error).splitlines()[0]
    return f"{proof}, {max(SPENT, default=0):.2f} s"


def rows():
    job = launch.ranks()
    where = "threads" if job is None else f"{launch.joined_by()}, 2 ranks"
    counts = (2, 4) if job is None else (2,)
    for name, case in CASES.items():
        try:
            whole = Rows(*data_of(case))
            case.build()
        except ImportError as error:
            note(where, name, f"left out: {error}")
            continue
        for K in counts:
            for solver in (Backprop(micro_batches=2), DDG(micro_batches=2)):
                row = f"{name}, {K} blocks, {solver.name}, m = 2"
                note(where, row, answer(trainer_of(case, K, solver), whole))
        if job is None:
            trainer = trainer_of(case, 1, Backprop(), replicas=2)
            note(where, f"{name}, 2 replicas", answer(trainer, whole))
    for name, sets in data().items():
        note(where, f"data: {name}", answer(trainer_of(CASE, 2, Backprop(2)), *sets()))
    whole = Rows(*data_of(CASE))
    for name, change in optimizers().items():
        trainer = trainer_of(CASE, 2, DDG(2))
        change(trainer)
        note(where, f"optimizer: {name}", answer(trainer, whole, whole))


def subjects():
    """Networks of usual sizes with a mini-batch each, a loss, and m micro-batches."""
    transformers = package("transformers")
    classes, ids = torch.randint(2, (64,)), torch.randint(20_000, (64, 128))
    chain = models.build("resnet20", classes=10, channels=3, image_size=32)
    images = (torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))
    yield "ResNet-20, batch 128, m = 8", chain, None, images, None, 128, 8
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": classes}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig())
    yield "BERT-base, 128 tokens, batch 16, m = 4", bert, texts, None, "model", 16, 4
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    texts = {"input_ids": ids, "labels": ids}
    yield "GPT-2, 128 tokens, batch 16, m = 4", gpt, texts, None, "model", 16, 4


class Texts(torch.utils.data.Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, i):
        return {name: x[i] for name, x in self.columns.items()}


def cost():
    """Seconds of the proof of two blocks on threads, and of a step of the run that follows."""
    for name, model, texts, pair, loss, size, m in subjects():
        torch.manual_seed(0)
        sample = None if texts is None else {key: x[:2] for key, x in texts.items()}
        cut = split(model, 2, sample=sample)
        train = {"epochs": 1, "batch_size": size, "threads": 1, "verify": "always"}
        train |= {"loss": loss} if loss else {}
        sets = pair if texts is None else Texts(texts)
        trainer = Trainer(cut, Backprop(micro_batches=m), train=train, metrics={}, quiet=True)
        SPENT.clear()
        begun = perf_counter()
        summary = trainer.fit(sets)
        whole, steps = perf_counter() - begun, (512 if texts is None else 64) // size
        step = summary["train_seconds"] / steps
        start = whole - max(SPENT) - summary["train_seconds"]
        text = f"{summary['proof']}; {max(SPENT):.2f} s, a step {step:.2f} s, start {start:.2f} s"
        note("cost", name, text)


if __name__ == "__main__":
    run.prove = timed
    nn.Module.__repr__ = object.__repr__  # type: ignore[method-assign]
    {"rows": rows, "cost": cost}[sys.argv[1]]()
