"""How blocks print themselves, in terminals and in notebooks."""

from torch import nn

from hybrid import models, split


def test_blocks_say_their_units_parameters_and_shares_and_not_the_whole_module():
    blocks = split(models.build("resnet8", classes=10, channels=1, image_size=8), 2)
    first, second = repr(blocks).splitlines()
    assert first == "block 0: stem to layer1.0, 4,848 parameters, 42% of the cost"
    assert second.startswith("block 1: layer2.0 to head, 70,154 parameters, ")
    assert blocks._repr_html_().startswith(
        "<table><tr><th>block</th><th>units</th><th>parameters</th><th>share of the cost</th></tr>"
        "<tr><td>0</td><td>stem to layer1.0</td><td>4,848</td><td>42%</td></tr>"
    )


def test_blocks_of_explicit_cuts_have_no_share_and_names_are_escaped():
    model = nn.Sequential()
    model.add_module("<b>", nn.Linear(2, 2))
    model.add_module("after", nn.Linear(2, 2))
    blocks = split(model, cuts=["after"])
    assert repr(blocks) == (
        "block 0: <b> to <b>, 6 parameters\nblock 1: after to after, 6 parameters"
    )
    assert "<td>&lt;b&gt; to &lt;b&gt;</td><td>6</td></tr>" in blocks._repr_html_()
    assert "share" not in blocks._repr_html_()
