"""Machines that are not alike: what is said or measured of them decides the cuts, and is kept."""

import resource

import pytest
import torch
from answers import assert_one_line, output, refusal
from torch import nn

from hybrid import Trainer, split
from hybrid.ranks import machines
from hybrid.ranks.machines import Machine, available_memory, settle_machines
from hybrid.settings.config import Config, SplitSettings
from hybrid.settings.resolve import load, read_toml
from hybrid.solvers import DDG

WORDS = "train --epochs 1 --batch-size 16 --set data.limit=32 --set train.threads=1".split()  # noqa: SIM905


def settings(run):
    return load({}, {}, base=read_toml(run / "config.toml")).split


def train(hybrid, run, *given, resume=0):
    """`resume`: how many epochs a resumed run has."""
    words = [word for each in given for word in ("--set", each)]
    resumed = ["--resume", "--epochs", str(resume)] if resume else []
    return hybrid(*WORDS, *resumed, *words, "--out", run)


def test_a_run_keeps_its_machines_and_cuts_and_its_file_repeats_it(hybrid, tmp_path):
    run, again = tmp_path / "run", tmp_path / "again"
    output(train(hybrid, run, "split.speeds=[1, 0.2]"))
    first = settings(run)
    assert (first.cuts, first.speeds) == (["head"], [1.0, 0.2])
    output(hybrid("train", run / "config.toml", "--out", again))
    assert settings(again) == first
    # what is as it was said before, or would be measured anew, changes nothing
    for epochs, same in enumerate(([], ["split.speeds=[1, 0.2]"], ["split.speeds=measured"]), 2):
        output(train(hybrid, run, *same, resume=epochs))
        assert settings(run) == first
    output(train(hybrid, run, "split.speeds=[1, 1]", resume=5))
    assert settings(run).cuts == ["layer2.0"]
    output(train(hybrid, run, 'split.cuts=["layer3.0"]', resume=6))
    assert (settings(run).cuts, settings(run).speeds) == (["layer3.0"], [])


def test_a_run_on_other_blocks_drops_its_machines_and_says_so(hybrid, tmp_path):
    output(train(hybrid, tmp_path, "split.speeds=[1, 0.5]", "split.memory=[1, 1]"))
    status, _, said = train(hybrid, tmp_path, "split.blocks=3", resume=2)
    assert status == 0
    for name in ("speeds", "memory"):
        assert f"hybrid: split.{name} is dropped, which was of 2 blocks\n" in said
    assert (settings(tmp_path).blocks, settings(tmp_path).speeds) == (3, [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["split.speeds=[1, 2, 3]", "split.blocks=2"], "for the machine of each of 2 blocks"),
        (["split.speeds=[1, nan]"], "from 1e-6 to 1e6 for the machine of each block, or measured"),
        (["split.memory=0"], "split.memory is 0; it must have a number"),
        (["split.speeds=[1, 2]", 'split.cuts=["head"]'], "split.cuts and split.speeds both settle"),
        (["split.memory=[1, 1e-5]"], "GB for unit 'head', and its machine's memory has 1e-05"),
        (
            ["split.speeds=measured", "split.replicas=2"],
            "split.speeds is measured, and which ranks have a block is not settled",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(hybrid, tmp_path, given, said):
    assert_one_line(train(hybrid, tmp_path, *given), said)


def test_a_file_of_the_users_with_two_ways_to_cut_is_refused(hybrid, tmp_path):
    file = tmp_path / "both.toml"
    file.write_text('[split]\ncuts = ["head"]\nmemory = [1, 1]\n')
    said = "split.cuts and split.memory both settle the cuts: leave one of the two out"
    assert_one_line(hybrid(*WORDS, file, "--out", tmp_path / "run"), said)
    file.write_text('[split]\ncuts = ["head"]\n')
    assert_one_line(
        hybrid(*WORDS, file, "--set", "split.memory=[1,1]", "--out", tmp_path / "run"), said
    )


def test_ranks_measure_their_machines_once(world, tmp_path):
    words = [*WORDS, "--out", tmp_path, "--set", "split.speeds=measured"]
    output(world.hybrid(2, *words, "--set", "split.memory=measured"))
    first = settings(tmp_path)
    assert max(first.speeds) == 1.0
    assert min(first.speeds) > 0
    assert len(first.speeds) == len(first.memory) == 2
    output(world.hybrid(2, *words, "--resume", "--epochs", "2"))
    assert settings(tmp_path) == first


@pytest.mark.parametrize(("side", "slow"), [("chain", [1]), ("peers", [0, 1])])
def test_a_block_is_as_fast_as_its_slowest_replica_and_a_host_shares_its_memory(side, slow):
    """Ranks 0 and 1 are on one host of 8 GB, whose second rank has a limit of 3 GB."""
    speeds, pools = [4.0, 2.0, 4.0, 3.2], [("a", 8e9), ("a", 8e9), ("b", 6e9), ("c", 9e9)]
    ranks = [Machine(s, {(host, "host"): x}) for s, (host, x) in zip(speeds, pools, strict=True)]
    ranks[1].memory["a", "limit"] = int(3e9)
    asked = dict.fromkeys(machines.NAMES, "measured")
    split_ = SplitSettings(blocks=2, replicas=2, side_by_side=side, **asked)
    made = settle_machines(split_, ranks)
    blocks = [[0, 2], [1, 3]] if side == "chain" else [[0, 1], [2, 3]]
    rooms = [4.0, 3.0, 6.0, 9.0]
    assert made.speeds == [min(speeds[r] for r in ranks_) / 4 for ranks_ in blocks]
    assert made.memory == [min(rooms[r] for r in ranks_) for ranks_ in blocks]


def test_blocks_of_one_process_share_its_machine():
    asked = SplitSettings(blocks=4, replicas=1, speeds="measured", memory="measured")
    made = settle_machines(asked, [Machine(7.0, {("a", "host"): int(8e9)})])
    assert (made.speeds, made.memory) == ([1.0] * 4, [2.0] * 4)


def test_nothing_is_measured_that_nobody_asks_for():
    assert machines.measure_machine(Config()) is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_process_is_what_its_groups_leave_of_it(tmp_path, version, monkeypatch):
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    kind, stat = ("memory", "total_inactive_file") if version == 1 else ("", "inactive_file")
    top = tmp_path / "sys/fs/cgroup" / kind
    (top / "outer/inner").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/x\n4:{kind}:/outer/inner\n")
    (tmp_path / "proc/self/status").write_text("VmSize:\t  1000 kB\nVmData:\t 10 kB\n")
    for folder, most, used, cached in (("outer", "7000", 3000, 500), ("outer/inner", "max", 1, 0)):
        for name, x in zip((*names, "stat"), (most, used, f"{stat} {cached}\n"), strict=True):
            (top / folder / f"memory.{name}").write_text(str(x))
    limits = {resource.RLIMIT_AS: 2_000_000, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 0))
    found = sorted(x for _, x in available_memory(tmp_path))
    assert found == [7000 - 3000 + 500, 2_000_000 - 1_024_000, 5000 * 1024]


class Noisy(nn.Module):
    """What a pass changes: numbers are drawn, statistics follow."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
        self.end = nn.Linear(width, 8)

    def forward(self, x):
        return self.end(self.body(x)) + x


def fitted(memory=(), cuts=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy(width) for width in (64, 8, 8, 8)), nn.Linear(8, 4))
    x, y = torch.randn(16, 8), torch.arange(16) % 4
    blocks = split(model, None if cuts else 2, cuts=cuts, sample=x[:4], memory=memory)
    trainer = Trainer(blocks, solver=DDG(), quiet=True)
    trainer.options.train = trainer.options.train.model_copy(update={"batch_size": 8})
    trainer.fit((x, y), epochs=2)
    return trainer.blocks.cuts, model.state_dict()


def test_a_trainer_moves_cuts_to_where_there_is_room_and_changes_no_bit_by_looking():
    wide, _ = fitted([1, 1])
    cuts, state = fitted([1, 9e-6])
    assert cuts != wide
    same, expected = fitted(cuts=cuts)
    assert same == cuts
    assert all(torch.equal(state[name], x) for name, x in expected.items())
    assert "and its machine's memory has 1e-06: take more blocks" in refusal(fitted, [1, 1e-6])
