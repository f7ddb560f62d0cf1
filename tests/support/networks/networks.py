"""A zoo: networks of many kinds, and how each of them is trained for a moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import rows
import torch
from rows import Rows
from small_networks import Characters, Masked, TwoHeads, UNet, mlp, signals
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_map
from trainings import trainer_of
from zoo_packages import package

from hybrid import Trainer
from hybrid.settings.config import OptimizerSettings

BATCH, EPOCHS = 16, 2


@dataclass(frozen=True)
class Network:
    """One of the zoo."""

    build: Callable[[], nn.Module]
    data: Callable[[], Rows]
    loss: Callable[[Any, Any], Tensor] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None
    needs: str = ""
    """A package that it is from."""
    rate: float = 0.02

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def trainer(self, blocks: int, **settings: Any) -> Trainer:
        """Of few steps on so many blocks."""
        sample = tree_map(lambda x: x[:4], self.data().inputs)
        settings = {"loss": self.loss, "metrics": self.metrics, **settings}
        return trainer_of(
            self.make(),
            blocks=blocks,
            sample=sample,
            train={"epochs": EPOCHS, "batch_size": BATCH},
            optimizer=OptimizerSettings(lr=self.rate),
            **settings,
        )

    def fit(self, trainer: Trainer) -> dict[str, Any]:
        return trainer.fit(*(rows.data for rows in self.data().parted()))


def following(out: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (N, T, V) logits and (N, T) characters."""
    return cross_entropy(out.flatten(0, 1), targets.flatten())


def explained(out: Tensor, targets: Tensor) -> Tensor:
    """R^2 where targets of the test have mean 0 and this variance."""
    _, test = rows.diabetes().parted()
    return 1 - (out - targets).square() / test.targets.var(unbiased=False)


def both(out: Any, targets: Any) -> Tensor:
    """Of a class and of a number."""
    (logits, number), (classes, numbers) = out, targets
    return cross_entropy(logits, classes) + mse_loss(number, numbers)


def right_kinds(out: Any, targets: Any) -> Tensor:
    return (out[0].argmax(1) == targets[0]).float()


def of_torchvision(name: str, **settings: Any) -> nn.Module:
    return getattr(package("torchvision.models"), name)(num_classes=4, **settings)


def of_timm(module: str, name: str, **settings: Any) -> nn.Module:
    return getattr(package(f"timm.models.{module}"), name)(num_classes=4, **settings)


def vision_transformer() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 2}
    made = of_torchvision("VisionTransformer", **sizes, hidden_dim=32, mlp_dim=64)
    nn.init.normal_(made.heads.head.weight, std=0.02)  # which torchvision starts at 0
    return made


def vgg11() -> nn.Module:
    made = of_torchvision("vgg11")
    made.avgpool, made.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 4)
    return made


def vit_tiny() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "depth": 4}
    return of_timm("vision_transformer", "vit_tiny_patch16_224", **sizes)


def convnext() -> nn.Module:
    return of_timm("convnext", "ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def mixer() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 4, "embed_dim": 32}
    return of_timm("mlp_mixer", "MlpMixer", **sizes)


def characters() -> nn.Module:
    return Characters(int(rows.text().targets.max()) + 1, rows.LENGTH)


def two_heads() -> nn.Module:
    return TwoHeads(10, 2)


TORCHVISION: dict[str, Network] = {
    "resnet18": Network(lambda: of_torchvision("resnet18"), rows.images),
    "resnet50": Network(lambda: of_torchvision("resnet50"), rows.images, rate=1e-3),
    "vgg11": Network(vgg11, rows.images),
    "VisionTransformer": Network(vision_transformer, rows.images),
}
TIMM = {
    "resnet18": Network(lambda: of_timm("resnet", "resnet18"), rows.images),
    "vit_tiny": Network(vit_tiny, rows.images),
    "ConvNeXt": Network(convnext, rows.images),
    "MlpMixer": Network(mixer, rows.images),
}
SMALL = {
    "character Transformer": Network(characters, rows.text, following, rate=0.1),
    "MLP regression": Network(lambda: mlp(10), rows.diabetes, mse_loss, {"R^2": explained}),
    "1-d convolutions": Network(lambda: signals(classes=3), rows.waves),
    "U-Net": Network(lambda: UNet(classes=3), rows.pixels),
    "two inputs": Network(lambda: Masked(20, 2), rows.sentences),
    "two outputs": Network(two_heads, rows.kinds, both, {"kinds": right_kinds}, rate=5e-3),
}
ZOO = {
    **{f"torchvision {name}": replace(n, needs="torchvision") for name, n in TORCHVISION.items()},
    **{f"timm {name}": replace(n, needs="timm") for name, n in TIMM.items()},
    **SMALL,
}
