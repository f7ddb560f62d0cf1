"""Pictures of factors: a heat map of their classes and the images they respond to."""

from __future__ import annotations

from io import BytesIO

import torch
from torch.nn import functional as F

from hybrid.report.chart import Chart
from hybrid.report.factors import Factor, Responses
from hybrid.report.page import Html, drawing, heading, note, paragraph, picture, row

_SIDE = 48
"""Pixels that a thumbnail is enlarged to, about; 64 factors then take 0.9 MB."""
_GAP = 3
_CODE = (1.0, 0.45, 0.0)
"""Color that codes are drawn in."""


def section(found: Responses) -> list[Html]:
    """The part of the page that shows one layer's factors."""
    parts = [heading(2, f"What each factor responds to ({found.layer})")]
    if not found.factors:
        return [*parts, note(f"No factor responds to any of {found.images} test images.")]
    maps = found.factors[0].codes is not None
    below = " Below each image its code map, over the image in grey." if maps else ""
    parts += [
        paragraph(
            f"Mean codes over {found.images} test images; the share of a class is the factor's "
            "mean code over images of that class, divided by the sum over all classes."
        ),
        row([drawing(heat_map(found), "share of each class in the response of each factor")]),
        paragraph("The test images with the largest mean code, the largest first." + below),
        row(_factor(found, factor) for factor in found.factors),
    ]
    if found.left_out:
        shown = f"the {len(found.factors)} with the largest mean code are shown."
        parts.append(paragraph(f"{found.left_out} more factors respond; {shown}"))
    if found.unused:
        numbers = ", ".join(map(str, found.unused))
        parts.append(note(f"Unused factors, which respond to no image: {numbers}."))
    return parts


def heat_map(found: Responses) -> Chart:
    """The shares, factor x class."""
    numbers = [factor.number for factor in found.factors]
    shares = found.shares[numbers]
    chart = Chart("class", "factor", height=1.2 + 0.2 * len(numbers))
    axes = chart.axes
    axes.grid(visible=False)
    drawn = axes.imshow(shares.numpy(), cmap="magma_r", vmin=0, aspect="auto")
    axes.set_yticks(range(len(numbers)), list(map(str, numbers)))
    chart.figure.colorbar(drawn, ax=axes, label="share of the response")
    return chart


def strip(factor: Factor) -> bytes:
    """JPEG: the factor's images side by side; below them their code maps, where it has any."""
    from PIL.Image import fromarray

    pictures = factor.images.float() / 255
    channels, height, width = pictures.shape[1:]
    grey = pictures.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    scale = max(1, _SIDE // max(height, width))
    tiles = [F.interpolate(pictures if channels == 3 else grey, scale_factor=scale)]
    if factor.codes is not None:
        peak = factor.codes.max().clamp_min(torch.finfo().tiny)
        size = (height * scale, width * scale)
        codes = F.interpolate((factor.codes / peak).unsqueeze(1), size, mode="bilinear")
        color = torch.tensor(_CODE).view(1, 3, 1, 1)
        dimmed = 0.15 + 0.6 * F.interpolate(grey, scale_factor=scale)
        tiles.append(dimmed + 0.85 * codes * (color - dimmed))
    rows = [torch.cat([F.pad(t, (0, _GAP, 0, _GAP), value=1.0) for t in row], 2) for row in tiles]
    canvas = torch.cat(rows, 1)[:, :-_GAP, :-_GAP]
    buffer = BytesIO()
    pixels = canvas.clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0)
    fromarray(pixels.contiguous().numpy()).save(buffer, format="jpeg")
    return buffer.getvalue()


def _factor(found: Responses, factor: Factor) -> Html:
    classes = ", ".join(
        f"class {label} ({share:.0%})" for label, share in found.top_classes(factor.number)
    )
    alt = f"{len(factor.images)} test images with the largest mean code of factor {factor.number}"
    return picture(strip(factor), alt, f"factor {factor.number}: {classes}")
