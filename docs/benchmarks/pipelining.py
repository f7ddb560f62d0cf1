"""BERT and GPT-2 in two stages: torch.distributed.pipelining (1F1B, gloo) and this package.

python docs/benchmarks/pipelining.py        writes pipelining.json: interleaved runs, two ranks each
"""

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

LAYERS, WIDTH, LENGTH, BATCH, MICRO_BATCHES, STEPS, EPOCHS, REPEATS = 4, 256, 64, 16, 4, 8, 4, 3
VOCABULARY = 1000
HERE = Path(__file__).resolve().parent


def build(name):
    """The network, where to cut it, and what its logits are called."""
    import torch

    sys.path.insert(0, str(HERE.parents[1] / "tests/support/networks"))
    from zoo_packages import package

    library = package("transformers")
    library.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name == "gpt2":
        config = library.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            n_positions=LENGTH,
            tie_word_embeddings=False,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        return library.GPT2LMHeadModel(config), f"transformer.h.{LAYERS // 2}"
    config = library.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        num_labels=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return library.BertForTokenClassification(config), f"bert.encoder.layer.{LAYERS // 2}"


def tokens():
    import torch

    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH))


def loss(logits, targets):
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def theirs(name):
    """Seconds of the epochs after the first, and the weights' checksum of this stage."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    from hybrid.ranks import launch

    launch.keep_memory()
    torch.set_num_threads(1)
    model, cut = build(name)
    ids = tokens()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    micro = ids[: BATCH // MICRO_BATCHES]
    pipe = pipeline(model, (micro,), split_spec={cut: SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    seconds = []
    for _ in range(EPOCHS):
        dist.barrier()
        begun = perf_counter()
        for batch in ids.split(BATCH):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
        dist.barrier()
        seconds.append(perf_counter() - begun)
    dist.destroy_process_group()
    return seconds[1:]


def ours(name, **settings):
    """Seconds of the epochs after the first."""
    import torch

    from hybrid import Callback, Trainer, split
    from hybrid.solvers import Backprop

    class Clock(Callback):
        ends: list = []  # noqa: RUF012

        def on_epoch(self, epoch, results):
            self.ends.append(perf_counter())

    model, cut = build(name)
    ids = tokens()
    clock = Clock()
    trainer = Trainer(
        split(model, cuts=[cut], sample=ids[:2]),
        settings.pop("solver", Backprop(micro_batches=MICRO_BATCHES)),
        loss=lambda out, targets: loss(out.logits, targets),
        metrics={},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedule={"name": "constant", "warmup_steps": 0},
        train={"batch_size": BATCH, "threads": 1, "epochs": EPOCHS, "report_every": STEPS},
        callbacks=[clock],
        quiet=True,
        **settings,
    )
    trainer.fit((ids, ids), None)
    return [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]


def delayed(name):
    from hybrid.solvers import DDG

    return ours(name, solver=DDG(micro_batches=MICRO_BATCHES))


def plain(name):
    """Seconds of epochs of the undivided network on one rank, with accumulated micro-batches."""
    import torch

    from hybrid.ranks import launch

    launch.keep_memory()
    torch.set_num_threads(1)
    model, _ = build(name)
    optimizer, seconds, ids = torch.optim.AdamW(model.parameters(), lr=1e-3), [], tokens()
    for _ in range(EPOCHS):
        begun = perf_counter()
        for batch in ids.split(BATCH):
            optimizer.zero_grad()
            for part in batch.split(BATCH // MICRO_BATCHES):
                (loss(model(part).logits, part) / MICRO_BATCHES).backward()
            optimizer.step()
        seconds.append(perf_counter() - begun)
    return seconds[1:]


SIDES = {"torch": theirs, "hybrid": ours, "hybrid ddg": delayed, "plain": plain}


def one(side, name):
    seconds = SIDES[side](name)
    rank = int(os.environ.get("RANK", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print("RESULT", json.dumps({"rank": rank, "seconds": seconds, "peak_mb": peak}), flush=True)


def run(side, name):
    """Median tokens a second, and the peak memory of the ranks in MB."""
    ranks = 1 if side == "plain" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, side, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    if done.returncode or len(lines) < ranks:
        return {"failed": (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]}
    results = sorted((json.loads(line) for line in lines), key=lambda each: each["rank"])
    rates = [STEPS * BATCH * LENGTH / s for s in results[0]["seconds"]]
    return {"tokens_per_second": rates, "peak_mb": [each["peak_mb"] for each in results]}


def main():
    results_by_name = {name: {side: [] for side in SIDES} for name in ("bert", "gpt2")}
    for _ in range(REPEATS):
        for name, sides in results_by_name.items():
            for side, results in sides.items():
                results.append(run(side, name))
                print(name, side, results[-1], flush=True)
                (HERE / "pipelining.json").write_text(json.dumps(results_by_name, indent=1))
    for name, sides in results_by_name.items():
        for side, results in sides.items():
            rates = [rate for each in results for rate in each.get("tokens_per_second", ())]
            all_peaks = [each["peak_mb"] for each in results if "peak_mb" in each]
            if rates:
                middle = statistics.median(rates)
                spread = f"{min(rates):.0f} to {max(rates):.0f}"
                peaks = [max(each) for each in zip(*all_peaks, strict=True)]
                print(f"{name:5} {side:11} {middle:8.0f} tokens/s ({spread}), peak {peaks} MB")


if __name__ == "__main__":
    one(*sys.argv[1:]) if len(sys.argv) > 1 else main()
