"""Links by name: each trains to the same bits, and what cannot join the ranks is refused."""

import pytest
from answers import refusal
from trainings import assert_same, digits, trained_weights, trainer

from hybrid.links import RankLinks
from hybrid.ranks.starting import check_links
from hybrid.registries import LINKS
from hybrid.settings.config import LinkSettings
from hybrid.solvers import AugmentedLagrangian, Backprop

PASSES = ("running_mean", "running_var", "num_batches_tracked")
"""What counts passes and averages over them."""


@pytest.fixture(scope="module")
def few():
    return digits(2)


@pytest.fixture(scope="module")
def expected(few):
    return trained_weights(trained(), few)


def trained(**settings):
    links = LinkSettings(**settings)
    return trainer(AugmentedLagrangian(), None, 2, train={"epochs": 1}, links=links)


def test_the_name_of_links_leads_to_their_class():
    for name, cls in LINKS.items():
        assert cls.name == name
        assert issubclass(cls, RankLinks)
        assert cls.settings <= LinkSettings.model_fields.keys()


@pytest.mark.parametrize("name", [n for n, cls in LINKS.items() if cls.in_one_process])
def test_all_links_of_one_process_train_to_the_same_bits(name, few, expected):
    assert_same(trained_weights(trained(kind=name), few), expected)


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        ({"kind": "virtual"}, 1, "'virtual', which runs in one process, but a launcher has st"),
        ({"kind": "threads"}, 2, "'threads', which runs in one process"),
        ({"kind": "mpi"}, 0, "'mpi', whose ranks are processes, and no launcher has started any"),
        ({"kind": "virtual", "timeout": 3.0}, 0, "links.timeout is 3.0, which has an effect"),
        ({"kind": "mpi", "latency_microseconds": 3.0}, 2, "reads it (virtual): leave it out"),
        ({"kind": "threads", "device": "host"}, 0, "links.device is 'host', which has an effect"),
        ({"kind": "threads", "device": "nccl"}, 0, "'nccl', which connects processes"),
        ({"device": "nccl"}, 0, "'nccl', which connects processes"),
        ({"kind": "mpi", "device": "nccl"}, 2, "that links.kind auto or torch joins"),
        ({"kind": "torch", "device": "mpi"}, 2, "'mpi', which needs ranks joined by MPI"),
        ({"device": "mpi"}, 0, "start them with mpirun or srun and leave links.kind out"),
        ({"gigabits_per_second": 1.0}, 0, "links.gigabits_per_second is 1.0, which"),
        ({"gigabits_per_second": 1.0}, 2, "links.gigabits_per_second is 1.0, which"),
    ],
    ids=str,
)
def test_links_that_cannot_join_the_ranks_and_settings_without_effect_are_refused(
    settings, ranks, reason
):
    assert reason in refusal(check_links, LinkSettings(**settings), ranks)


def test_links_over_mpi_are_refused_where_torchrun_has_started_the_ranks(monkeypatch):
    monkeypatch.setattr("hybrid.ranks.launch.joined_by", lambda: "torch")
    said = refusal(check_links, LinkSettings(kind="mpi"), 2)
    assert "these 2 ranks were started without MPI: start them with mpirun -n 2" in said
    check_links(LinkSettings(kind="torch"), 2)


@pytest.mark.parametrize("name", [n for n, cls in LINKS.items() if cls.in_one_process])
def test_replicas_on_all_links_of_one_process_have_the_bits_of_one_chain(name, few):
    links = LinkSettings(kind=name)
    grid = trainer(Backprop(), None, 2, replicas=3, train={"epochs": 1}, links=links)
    chain = trainer(Backprop(micro_batches=3), None, 2, train={"epochs": 1})
    found, expected = (
        {k: v for k, v in trained_weights(each, few).items() if not k.endswith(PASSES)}
        for each in (grid, chain)
    )
    assert_same(found, expected)


def test_links_of_ranks_that_nobody_has_started_are_refused_before_training(few):
    said = refusal(trained(kind="mpi").fit, *few)
    assert said.startswith("links.kind is 'mpi', whose ranks are processes, and no launcher has")
