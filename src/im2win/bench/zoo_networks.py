"""The networks of the zoo: constructors from timm, torchvision and here, with random weights and calibrated normalisation."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SEED = 0
CALIBRATION = 2, 4  # batches, and images of each
_CLASSIFIERS = [
    "resnet18", "resnet50", "resnext50_32x4d", "regnety_008", "vgg16", "densenet121", "mobilenetv2_100", "mobilenetv3_large_100",
    "efficientnet_b0", "convnext_tiny", "tf_efficientnetv2_s", "ghostnet_100", "repvgg_a2", "cspdarknet53", "hrnet_w18_small", "dla34",
    "res2net50_26w_4s", "nfnet_l0", "rexnet_100", "mobileone_s0", "mnasnet_100", "wide_resnet50_2", "seresnet50", "xception41",
    "fbnetc_100", "darknet53", "vovnet39a",
]  # fmt: skip
_TIMM = dict.fromkeys(_CLASSIFIERS, 224) | {"inception_v3": 299}  # edges of the images
_TORCHVISION = {
    "shufflenet_v2_x1_0": "shufflenet_v2_x1_0",
    "squeezenet1_1": "squeezenet1_1",
    "googlenet": "googlenet",
    "deeplabv3_resnet50": "segmentation.deeplabv3_resnet50",
    "fcn_resnet50": "segmentation.fcn_resnet50",
    "lraspp_mobilenet_v3_large": "segmentation.lraspp_mobilenet_v3_large",
    "resnet50_fpn": "detection.backbone_utils.resnet_fpn_backbone",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "deeplabv3_resnet50": {"weights_backbone": None},
    "fcn_resnet50": {"weights_backbone": None},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
    "resnet50_fpn": {"backbone_name": "resnet50", "norm_layer": nn.BatchNorm2d},
}
_LIBRARIES: list[Any] = []  # what they define lasts as long as they do


@functools.cache
def vision(package: str) -> Any:
    """timm or torchvision, also beside a PyTorch for CPUs alone, where torchvision's own operators do not load."""
    try:
        return importlib.import_module(package)
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
    library: Any = torch.library.Library
    _LIBRARIES.append(library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(package)


class _Block(nn.Module):
    """A residual block of a diffusion U-Net: normalisation, SiLU, convolution, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.skip(x) + self.second(self.first(x))
        return result


class UNet(nn.Module):
    """A small diffusion U-Net without attention and time embedding: three levels, skips by concatenation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_Block(a, b) for a, b in zip([width, *sizes[:-1]], sizes, strict=True))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle = _Block(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(_Block(2 * size, max(width, size // 2)) for size in reversed(sizes))
        self.grow = nn.Upsample(scale_factor=2.0, mode="nearest")
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([self.grow(x), skips.pop()], 1))
        result: torch.Tensor = self.head(x)
        return result


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.body(x)
        return result


class CspFpn(nn.Module):
    """A detector's backbone: CSPDarknet-53 of timm with a feature pyramid of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = vision("timm").create_model("cspdarknet53", pretrained=False, features_only=True, out_indices=(3, 4, 5))
        vision("torchvision")
        pyramid = importlib.import_module("torchvision.ops").FeaturePyramidNetwork
        self.pyramid = pyramid(self.body.feature_info.channels(), 256)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self.pyramid({str(level): part for level, part in enumerate(self.body(x))}).values())


def edsr(width: int = 64, blocks: int = 16) -> nn.Module:
    """A super-resolution network like EDSR's baseline, twice the size, without the long skip."""
    body = [_Residual(width) for _ in range(blocks)]
    tail = [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)]
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *body, *tail)


def tiny() -> nn.Module:
    """Two layers, for trying the whole path."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))


_OWN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "unet": (UNet, 64),
    "edsr": (edsr, 96),
    "cspdarknet53_fpn": (CspFpn, 224),
    "tiny": (tiny, 32),
}
NETWORKS = [*_TIMM, *_TORCHVISION, *(name for name in _OWN if name != "tiny")]  # in the order of the table


def size_of(name: str) -> int:
    """Edge of the square images."""
    return _OWN[name][1] if name in _OWN else _TIMM.get(name, 224)


def images(name: str, batch: int) -> torch.Tensor:
    """Random normal images, the same every time."""
    size = size_of(name)
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(SEED))


def built(name: str) -> nn.Module:
    """The network in evaluation mode with the same random weights every time, float32, not calibrated."""
    torch.manual_seed(SEED)
    if name in _OWN:
        module = _OWN[name][0]()
    elif name in _TIMM:
        module = vision("timm").create_model(name, pretrained=False)
    else:
        vision("torchvision")
        where, _, constructor = f"torchvision.models.{_TORCHVISION[name]}".rpartition(".")
        module = getattr(importlib.import_module(where), constructor)(weights=None, **_OPTIONS.get(name, {}))
    return module.eval()


def calibrated(name: str, device: str = "cpu") -> nn.Module:
    """The network on a device, with running statistics of a few random batches: activations have the sizes of a trained network's."""
    module = built(name).to(device)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.reset_running_stats()
            part.momentum = None  # a plain mean over the batches
    batches, count = CALIBRATION
    module.train()
    with torch.no_grad():
        for _ in range(batches):
            module(torch.randn(count, 3, size_of(name), size_of(name)).to(device))
    return module.eval()
