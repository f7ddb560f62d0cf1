"""A model that no machine holds: what dies of its memory, and what trains, on two and three hosts.

    python docs/benchmarks/two_machines.py [--rows blocks] [--gigabytes 3.5]        # as root

Hosts are namespaces of network, names and mounts on this machine, each with a disk of its own, a
core, a limit of memory (a control group, whose killer ends what exceeds it), and a link of a chosen
rate. The model is the Llama of docs/examples/llama.py, trained by AdamW on texts. Rows that are in
the JSON are not repeated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import measuring

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BIN = Path(sys.executable).parent
MEMORY = Path("/sys/fs/cgroup/memory")
TRAIN = (
    *("train", "--data", "llama:texts", "--loss", "model", "--batch-size", "4", "--epochs", "2"),
    *("--lr", "1e-4", "--set", "optimizer.name=AdamW", "--set", "schedule.name=constant"),
    *("--set", "schedule.warmup_epochs=0", "--set", "train.report_every=1"),
    *("--set", "checkpoint.minutes=0", "--auto-resume"),
)


@dataclass(frozen=True)
class Row:
    """One run: of which program, on how many hosts, with how much memory and what links."""

    name: str
    hosts: int
    words: tuple[str, ...]
    gigabytes: float
    megabits: int = 1000
    loses: bool = False
    """Whether a host is lost on the way, and comes back."""


def rows(gigabytes: float) -> list[Row]:
    """Those that the cap kills, and those that train."""
    full, lora = ("--model", "llama:network"), ("--model", "llama:lora")
    weights = ("--weights", "disk/llama.safetensors")
    plain = (*full, *weights, "--solver", "backprop")
    blocks = (*full, *weights, "--solver", "ddg")
    alone = "one process, no limit"
    return [
        Row(alone, 1, (*plain, "--blocks", "1"), 0),
        Row("one process", 1, (*plain, "--blocks", "1"), gigabytes),
        Row("DistributedDataParallel", 2, ("ddp",), gigabytes),
        Row("DiLoCo", 2, (*plain, "--replicas", "2", "--set", "sync.name=diloco"), gigabytes),
        Row("2 blocks, flushed", 2, plain, gigabytes),
        Row("2 blocks, ddg", 2, blocks, gigabytes, loses=True),
        Row("2 blocks, ddg, 100 Mb/s", 2, blocks, gigabytes, 100),
        Row("3 blocks, ddg", 3, blocks, gigabytes),
        Row("LoRA, one process, no limit", 1, (*lora, "--solver", "backprop", "--blocks", "1"), 0),
        Row("LoRA, 2 blocks, ddg, 100 Mb/s", 2, (*lora, "--solver", "ddg"), gigabytes, 100),
    ]


class Hosts:
    """Hosts with addresses 10.77.0.1, ... on one bridge; all ends with `down`."""

    def __init__(self, root: Path, row: Row) -> None:
        self.root, self.row = root, row
        self.jobs: dict[int, subprocess.Popen[str]] = {}
        self.before = 0
        """Processes that limits have ended in earlier rows."""

    def up(self) -> None:
        names = [f"10.77.0.{k + 1} host{k}" for k in range(self.row.hosts)]
        (self.root / "names").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        _run("ip link add hybrid0 type bridge")
        _run("ip link set hybrid0 up")
        for k in range(self.row.hosts):
            (self.root / f"disk-{k}").mkdir()
            _run(f"ip netns add hybrid{k}")
            _run(f"ip link add hv{k} type veth peer name eth0 netns hybrid{k}")
            _run(f"ip link set hv{k} master hybrid0 up")
            _run(f"ip -n hybrid{k} addr add 10.77.0.{k + 1}/24 dev eth0")
            _run(f"ip -n hybrid{k} link set eth0 up")
            _run(f"ip -n hybrid{k} link set lo up")
            limit = f"root tbf rate {self.row.megabits}mbit burst 1mb latency 50ms"
            _run(f"tc -n hybrid{k} qdisc add dev eth0 {limit}")
            _run(f"tc qdisc add dev hv{k} {limit}")
            group = MEMORY / f"hybrid{k}"
            group.mkdir(exist_ok=True)
            limit = str(int(1e9 * self.row.gigabytes) or -1)
            (group / "memory.limit_in_bytes").write_text(limit)
            (group / "memory.max_usage_in_bytes").write_text("0")
        self.before = self.killed()

    def start(self, k: int, command: Sequence[str]) -> None:
        """Start a program on a host, with its disk at `disk` in the folder of all."""
        setup = (
            f"echo $$ > {MEMORY / f'hybrid{k}'}/tasks; hostname host{k}; mkdir -p disk; "
            f"mount --bind disk-{k} disk; mount --bind names /etc/hosts; "
            f'exec taskset -c {k % (os.cpu_count() or 1)} "$@"'
        )
        enter = ["nsenter", f"--net=/run/netns/hybrid{k}", "unshare", "-m", "-u"]
        words = [*enter, "sh", "-c", setup, "_"]
        paths = [str(Path(__file__).parent), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
        environment = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "CI": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        log = (self.root / f"host-{k}.log").open("a")
        self.jobs[k] = subprocess.Popen(
            [*words, *command],
            cwd=self.root,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def said(self) -> str:
        return "\n".join(f.read_text(errors="replace") for f in self.root.glob("host-*.log"))

    def peaks(self) -> list[float]:
        """The most memory that each host has had, cached files included, in GB."""
        files = [MEMORY / f"hybrid{k}/memory.max_usage_in_bytes" for k in range(self.row.hosts)]
        return [round(int(file.read_text()) / 1e9, 2) for file in files]

    def killed(self) -> int:
        """Processes that the limits have ended."""
        files = [MEMORY / f"hybrid{k}/memory.oom_control" for k in range(self.row.hosts)]
        counts = [int(re.findall(r"oom_kill (\d+)", file.read_text())[0]) for file in files]
        return sum(counts) - self.before

    def lose(self, k: int) -> None:
        """Kill -9 all of a host's processes."""
        for pid in (MEMORY / f"hybrid{k}/tasks").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.jobs.pop(k).wait()

    def down(self) -> None:
        for k in [*self.jobs]:
            self.lose(k)
        for k in range(self.row.hosts):
            _run(f"ip link del hv{k}", check=False)
            _run(f"ip netns del hybrid{k}", check=False)
            with suppress(OSError):
                (MEMORY / f"hybrid{k}").rmdir()
        _run("ip link del hybrid0", check=False)


def _run(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check)


@contextmanager
def hosts(row: Row) -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="hybrid-hosts-", ignore_cleanup_errors=True) as root:
        made = Hosts(Path(root), row)
        try:
            made.up()
            yield made
        finally:
            made.down()


def command(row: Row) -> list[str]:
    """What is started on every host."""
    if row.words == ("ddp",):
        program = [str(Path(__file__).resolve()), "--role", "ddp"]
    else:
        program = ["-m", "hybrid", *TRAIN, *row.words, "--out", "disk/run"]
    if row.hosts == 1:
        return [sys.executable, *program]
    meeting = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,timeout=300"
    return [
        *(str(BIN / "torchrun"), "--nnodes", str(row.hosts), "--nproc-per-node", "1"),
        *("--max-restarts", "3" if row.loses else "0", "--rdzv-backend", "c10d"),
        *("--rdzv-id", "job", "--rdzv-endpoint", "10.77.0.1:29500", "--rdzv-conf", meeting),
        *("--monitor-interval", "0.5", *program),
    ]


def measure(row: Row, weights: Path, limit: float) -> dict[str, Any]:
    """Run a row to its end, or `limit` seconds."""
    with hosts(row) as there:
        shutil.copy(weights, there.root / "disk-0" / "llama.safetensors")
        begin = monotonic()
        for k in range(row.hosts):
            there.start(k, command(row))
        lost = back = 0.0
        run = there.root / "disk-0" / "run"
        while any(job.poll() is None for job in there.jobs.values()) and not there.killed():
            sleep(0.2)
            steps = _lines(run)
            if row.loses and not lost and steps and steps[-1]["step"] >= 30:
                there.lose(1)
                lost, last_step = monotonic(), steps[-1]["step"]
                sleep(1)
                there.start(1, command(row))
            if lost and not back and _starts(run) > 1 and steps[-1]["step"] > 24:
                back = monotonic()
            if monotonic() - begin > limit:
                break
        result: dict[str, Any] = {"killed": there.killed(), "peak_GB": there.peaks()}
        result["seconds"] = round(monotonic() - begin, 1)
        steps = _lines(run)
        if steps:
            tail = steps[len(steps) // 4 :]
            samples, seconds = (sum(s[name] for s in tail) for name in ("samples", "seconds"))
            result["samples_per_second"] = round(samples / seconds, 3)
            result["losses"] = [round(s["loss"], 4) for s in steps]
        if (run / "summary.json").exists():
            summary = json.loads((run / "summary.json").read_text())
            result["test_loss"] = summary["test_loss"]
            result["peak_GB"] = [round(n / 1e9, 2) for n in summary["peak_memory_bytes"]]
            result["checkpoint_seconds"] = summary["checkpoint_seconds"]
        if lost:
            result["seconds_to_next_step"] = round(back - lost, 1)
            result["lost_after_step"] = last_step
        result["said"] = [x for x in there.said().splitlines() if x.startswith("hybrid: error")]
        if not steps and not result["killed"]:
            print(there.said()[-6000:])
        return result


def _lines(run: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [x for x in map(json.loads, lines) if x["phase"] in ("serial", "parallel")]
    return []


def _starts(run: Path) -> int:
    with suppress(OSError):
        return len((run / "starts.jsonl").read_text().splitlines())
    return 0


def ddp() -> None:
    """A plain loop of torch's DistributedDataParallel, of the same network and optimizer."""
    import llama
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(llama.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in DataLoader(llama.texts()[0], batch_size=2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    options = measuring.options(__doc__, rows="", gigabytes=3.5, limit=900.0, role=None)
    if options.role == "ddp":
        ddp()
        return
    sys.path.insert(0, str(EXAMPLES))
    import llama
    import torch
    from safetensors.torch import save_file

    raw = measuring.Raw(__file__)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "llama.safetensors")
        torch.manual_seed(0)
        save_file(llama.network().state_dict(), weights)
        for row in rows(options.gigabytes):
            if options.rows in row.name and not raw.get("rows", row.name):
                result = measure(row, weights, options.limit)
                raw.keep("rows", row.name, value=result)
                print(row.name, {k: v for k, v in result.items() if k != "losses"}, flush=True)


if __name__ == "__main__":
    main()
