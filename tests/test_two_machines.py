"""What docs/two-machines.md tells a user to type trains on two hosts, which are namespaces here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from world import for_mpirun

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAGE = ROOT / "docs" / "two-machines.md"
BOTH = ["host0", "host1"]
ADDRESSES = "10.0.0.1", "10.0.0.2"


def commands(heading):
    """The code blocks under a heading of the page, with fewer samples to train on."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", section, re.M)]
    return [block.replace("hybrid train", "hybrid train --set data.limit=256") for block in blocks]


class Hosts:
    """Two hosts on one link, each with its own runs: namespaces of network, name and mounts."""

    def __init__(self, folder):
        self.folder, self.pids, self.started = folder, [], []
        # who is not root is root in a namespace of users, which both hosts are in
        self.user = os.geteuid() != 0

    def up(self):
        """Start both; a skip where that is not allowed."""
        self.hold("unshare", *(["--user", "--map-root-user"] if self.user else []))
        self.hold(*(self.enter(0, "-U") if self.user else []), "unshare")
        self.run(0, f"ip link add eth0 type veth peer name eth0 netns {self.pids[1]}")
        for number, address in enumerate(ADDRESSES):
            self.run(number, f"ip addr add {address}/24 dev eth0; hostname host{number}")
            self.run(number, "ip link set lo up; ip link set eth0 up")
            runs = self.folder / f"runs of host{number}"
            runs.mkdir()
            (self.folder / "runs").mkdir(exist_ok=True)
            self.run(number, f"mount --bind '{runs}' runs")

    def hold(self, *unshare):
        """Start the process that a host's namespaces belong to."""
        words = [*unshare, "--net", "--uts", "--mount", "sh", "-c", "echo up; exec sleep 600"]
        holder = self.popen(words, stderr=subprocess.PIPE)
        if holder.stdout.readline() != "up\n":
            pytest.skip(f"no network namespaces can be made here: {holder.stderr.read().strip()}")
        self.pids.append(holder.pid)

    def enter(self, number, *namespaces):
        """The words before a command on a host."""
        users = ["-U", "--preserve-credentials"] if self.user else []
        return ["nsenter", "-t", str(self.pids[number]), *users, *namespaces]

    def start(self, number, command, **environment):
        inside = [*self.enter(number, "-n", "-u", "-m"), "env", "-C", self.folder]
        words = [*inside, "bash", "-ec", command]
        return self.popen(words, env=os.environ | environment, stderr=subprocess.STDOUT)

    def run(self, number, command, **environment):
        return self.output(self.start(number, command, **environment))

    def output(self, job):
        said, _ = job.communicate(timeout=100)
        assert job.returncode == 0, said
        return said

    def popen(self, words, **options):
        options |= {"cwd": self.folder, "text": True, "start_new_session": True}
        self.started.append(subprocess.Popen(words, stdout=subprocess.PIPE, **options))
        return self.started[-1]

    def down(self):
        for job in self.started:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.fixture
def hosts(tmp_path):
    if left := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        pytest.skip(f"there is no {', '.join(left)} here")
    made = Hosts(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def environment(hosts, tmp_path):
    """What the user's shells have, and in place of ssh what starts elsewhere without it."""
    ssh = tmp_path / "ssh"
    there = " ".join(hosts.enter(1, "-n", "-u", "-m"))
    clean = f"env -i HOME=$HOME PATH=/usr/bin:/bin PYTHONPATH={ROOT}"
    ssh.write_text(f'#!/bin/sh\nshift\ncd /\nexec {there} {clean} sh -c "$*"\n')
    ssh.chmod(0o755)
    return for_mpirun() | {
        "VIRTUAL_ENV": str(BIN.parent),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PRTE_MCA_plm_ssh_agent": str(ssh),
    }


# Both take the seconds in which two ranks, and torchrun's two agents, import torch.


def test_the_commands_for_mpirun_train_on_two_hosts(hosts, environment, tmp_path):
    words = re.sub(r"^.* doctor\n", "", "".join(commands("mpirun")), flags=re.MULTILINE)
    assert "epoch 1/1" in hosts.run(0, words, **environment)
    assert [trained(tmp_path / f"runs of host{k}/mpirun") for k in range(2)] == [BOTH] * 2


def test_the_commands_for_torchrun_train_on_two_hosts(hosts, environment, tmp_path):
    both = [hosts.start(k, words, **environment) for k, words in enumerate(commands("torchrun"))]
    assert "epoch 1/1" in "".join(map(hosts.output, both))
    assert [trained(tmp_path / f"runs of host{k}/torchrun") for k in range(2)] == [BOTH] * 2


def trained(run):
    """The hosts of a run that has ended well, whose checkpoint has both blocks."""
    assert (run / "summary.json").exists()
    newest = max(run.glob("checkpoints/*"), key=lambda folder: int(folder.name))
    units = {file.stem for file in newest.glob("*.safetensors")}
    assert {"stem", "head"} <= units
    return json.loads((run / "starts.jsonl").read_text().splitlines()[0])["hosts"]


def test_the_recipes_of_both_containers_run_the_same_lines():
    page = (ROOT / "docs/containers.md").read_text()
    docker, apptainer = re.findall(r"^```(?:dockerfile|singularity)\n(.*?)^```", page, re.M | re.S)
    post = apptainer.partition("%post\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^RUN (.*)", docker, re.MULTILINE)
    assert lines == textwrap.dedent(post).splitlines()
    (extras,) = re.findall(r"/src\[(.*)\]", lines[-1])
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras.split(","))
