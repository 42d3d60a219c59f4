"""Named suites of convolution layers: the literal tables that benchmarks, tuning runs and tests iterate.

A row is (name, key, count). The key is a `Conv2d` key without its batch. The count says how often the layer occurs in its network. The
batch is the caller's, or the suite's default.

Sources:
    papers12: the twelve layers of the im2win papers (arXiv 2306.14320 for CPUs, 2306.14316 for GPUs; table 3-3 of the thesis behind them);
    float32, no padding. The papers run batch 128. The default here is 8, so that a layer takes milliseconds on a desktop CPU; ``batch=128``
    reproduces the papers.
    resnet50: He et al., "Deep Residual Learning", arXiv 1512.03385, table 1, in the variant of the ONNX model zoo (Caffe2; "v1.5" in
    torchvision): the 3x3 of a stage's first block has stride 2, where the paper gives it to the 1x1 before. Plain convolutions without
    bias, as in the graph, where batch normalisation follows each. Names are stage_block_role, of the first layer with that shape.
    vgg16: Simonyan and Zisserman, arXiv 1409.1556, table 1, configuration D, each with its bias and ReLU. Its shapes are those of VGG-19.
    mobilenet_v2: Sandler et al., arXiv 1801.04381, table 2, width 1.0, 224x224; batch normalisation folded to a bias, ReLU6 fused where the
    network has it (the projections are linear), residual additions left out. Names are the bottleneck's number and role.
    winograd64: the sweep of the study of Winograd convolution on tensor cores with partial kernel fusion: 3x3, 64 channels and filters,
    padding 1, maps from 224 to super-resolution's 960. The source runs float16 and int8; these are float32, and ``conv.with_(dtype=...)``
    changes that.
    sliding: the study of sliding-window kernels in CUDA: 3 channels, 3 filters of 3x3, square images from 128 to 8192, strides 1 to 3,
    padding 1 (the source's printed output sizes are those without padding).
"""

from __future__ import annotations

from dataclasses import dataclass

from im2win.spec.conv2d import Conv2d

Row = tuple[str, str, int]


@dataclass(frozen=True)
class Layer:
    """A convolution with its name in its network and the number of times that it occurs there."""

    name: str
    conv: Conv2d
    count: int = 1


@dataclass(frozen=True)
class Suite:
    """A table of layers: a one-line title, the default batch and rows of (name, key without batch, count)."""

    title: str
    batch: int
    rows: tuple[Row, ...]

    def layers(self, batch: int | None = None) -> list[Layer]:
        """The layers at this batch (default: the suite's).

        Raises:
            ConvError: `batch` is not a positive integer, or too large for a layer's tensors.
        """
        chosen = self.batch if batch is None else batch
        return [Layer(name, Conv2d.parse(f"n1-{key}").with_(batch=chosen), count) for name, key, count in self.rows]


_PAPERS12: tuple[Row, ...] = (
    ("conv1", "c3x227x227-k96x11x11-s4", 1),
    ("conv2", "c3x231x231-k96x11x11-s4", 1),
    ("conv3", "c3x227x227-k64x7x7-s2", 1),
    ("conv4", "c64x224x224-k64x7x7-s2", 1),
    ("conv5", "c96x24x24-k256x5x5", 1),
    ("conv6", "c256x12x12-k512x3x3", 1),
    ("conv7", "c3x224x224-k64x3x3", 1),
    ("conv8", "c64x112x112-k128x3x3", 1),
    ("conv9", "c64x56x56-k64x3x3", 1),
    ("conv10", "c128x28x28-k128x3x3", 1),
    ("conv11", "c256x14x14-k256x3x3", 1),
    ("conv12", "c512x7x7-k512x3x3", 1),
)

_RESNET50: tuple[Row, ...] = (
    ("conv1", "c3x224x224-k64x7x7-s2-p3", 1),
    ("res2_1_reduce", "c64x56x56-k64x1x1", 1),
    ("res2_1_3x3", "c64x56x56-k64x3x3-p1", 3),
    ("res2_1_expand", "c64x56x56-k256x1x1", 4),  # three expansions and the shortcut, which has the same shape here only
    ("res2_2_reduce", "c256x56x56-k64x1x1", 2),
    ("res3_1_reduce", "c256x56x56-k128x1x1", 1),
    ("res3_1_3x3", "c128x56x56-k128x3x3-s2-p1", 1),
    ("res3_1_expand", "c128x28x28-k512x1x1", 4),
    ("res3_1_shortcut", "c256x56x56-k512x1x1-s2", 1),
    ("res3_2_reduce", "c512x28x28-k128x1x1", 3),
    ("res3_2_3x3", "c128x28x28-k128x3x3-p1", 3),
    ("res4_1_reduce", "c512x28x28-k256x1x1", 1),
    ("res4_1_3x3", "c256x28x28-k256x3x3-s2-p1", 1),
    ("res4_1_expand", "c256x14x14-k1024x1x1", 6),
    ("res4_1_shortcut", "c512x28x28-k1024x1x1-s2", 1),
    ("res4_2_reduce", "c1024x14x14-k256x1x1", 5),
    ("res4_2_3x3", "c256x14x14-k256x3x3-p1", 5),
    ("res5_1_reduce", "c1024x14x14-k512x1x1", 1),
    ("res5_1_3x3", "c512x14x14-k512x3x3-s2-p1", 1),
    ("res5_1_expand", "c512x7x7-k2048x1x1", 3),
    ("res5_1_shortcut", "c1024x14x14-k2048x1x1-s2", 1),
    ("res5_2_reduce", "c2048x7x7-k512x1x1", 2),
    ("res5_2_3x3", "c512x7x7-k512x3x3-p1", 2),
)

_VGG16: tuple[Row, ...] = (
    ("conv1_1", "c3x224x224-k64x3x3-p1-bias-relu", 1),
    ("conv1_2", "c64x224x224-k64x3x3-p1-bias-relu", 1),
    ("conv2_1", "c64x112x112-k128x3x3-p1-bias-relu", 1),
    ("conv2_2", "c128x112x112-k128x3x3-p1-bias-relu", 1),
    ("conv3_1", "c128x56x56-k256x3x3-p1-bias-relu", 1),
    ("conv3_2", "c256x56x56-k256x3x3-p1-bias-relu", 2),
    ("conv4_1", "c256x28x28-k512x3x3-p1-bias-relu", 1),
    ("conv4_2", "c512x28x28-k512x3x3-p1-bias-relu", 2),
    ("conv5_1", "c512x14x14-k512x3x3-p1-bias-relu", 3),
)

_MOBILENET_V2: tuple[Row, ...] = (
    ("conv1", "c3x224x224-k32x3x3-s2-p1-bias-relu6", 1),
    ("block1_depthwise", "c32x112x112-k32x3x3-p1-g32-bias-relu6", 1),
    ("block1_project", "c32x112x112-k16x1x1-bias", 1),
    ("block2_expand", "c16x112x112-k96x1x1-bias-relu6", 1),
    ("block2_depthwise", "c96x112x112-k96x3x3-s2-p1-g96-bias-relu6", 1),
    ("block2_project", "c96x56x56-k24x1x1-bias", 1),
    ("block3_expand", "c24x56x56-k144x1x1-bias-relu6", 2),
    ("block3_depthwise", "c144x56x56-k144x3x3-p1-g144-bias-relu6", 1),
    ("block3_project", "c144x56x56-k24x1x1-bias", 1),
    ("block4_depthwise", "c144x56x56-k144x3x3-s2-p1-g144-bias-relu6", 1),
    ("block4_project", "c144x28x28-k32x1x1-bias", 1),
    ("block5_expand", "c32x28x28-k192x1x1-bias-relu6", 3),
    ("block5_depthwise", "c192x28x28-k192x3x3-p1-g192-bias-relu6", 2),
    ("block5_project", "c192x28x28-k32x1x1-bias", 2),
    ("block7_depthwise", "c192x28x28-k192x3x3-s2-p1-g192-bias-relu6", 1),
    ("block7_project", "c192x14x14-k64x1x1-bias", 1),
    ("block8_expand", "c64x14x14-k384x1x1-bias-relu6", 4),
    ("block8_depthwise", "c384x14x14-k384x3x3-p1-g384-bias-relu6", 4),
    ("block8_project", "c384x14x14-k64x1x1-bias", 3),
    ("block11_project", "c384x14x14-k96x1x1-bias", 1),
    ("block12_expand", "c96x14x14-k576x1x1-bias-relu6", 3),
    ("block12_depthwise", "c576x14x14-k576x3x3-p1-g576-bias-relu6", 2),
    ("block12_project", "c576x14x14-k96x1x1-bias", 2),
    ("block14_depthwise", "c576x14x14-k576x3x3-s2-p1-g576-bias-relu6", 1),
    ("block14_project", "c576x7x7-k160x1x1-bias", 1),
    ("block15_expand", "c160x7x7-k960x1x1-bias-relu6", 3),
    ("block15_depthwise", "c960x7x7-k960x3x3-p1-g960-bias-relu6", 3),
    ("block15_project", "c960x7x7-k160x1x1-bias", 2),
    ("block17_project", "c960x7x7-k320x1x1-bias", 1),
    ("conv_last", "c320x7x7-k1280x1x1-bias-relu6", 1),
)

_WINOGRAD64: tuple[Row, ...] = tuple(
    (f"map{size}", f"c64x{size}x{size}-k64x3x3-p1", 1) for size in (224, 256, 320, 384, 448, 512, 640, 768, 896, 960)
)

_SLIDING: tuple[Row, ...] = tuple(
    (f"image{size}_s{stride}", f"c3x{size}x{size}-k3x3x3-s{stride}-p1", 1)
    for size in (128, 256, 512, 1024, 2048, 4096, 8192)
    for stride in (1, 2, 3)
)

SUITES: dict[str, Suite] = {
    "papers12": Suite("the 12 layers of the im2win papers", 8, _PAPERS12),
    "resnet50": Suite("ResNet-50 (stride on the 3x3)", 1, _RESNET50),
    "vgg16": Suite("VGG-16 with bias and ReLU", 1, _VGG16),
    "mobilenet_v2": Suite("MobileNetV2 with bias and ReLU6", 1, _MOBILENET_V2),
    "winograd64": Suite("3x3, 64 channels, maps 224 to 960", 1, _WINOGRAD64),
    "sliding": Suite("3 channels, 3x3, images 128 to 8192, strides 1 to 3", 1, _SLIDING),
}


def suite_names() -> list[str]:
    """Names that `suite` accepts."""
    return list(SUITES)


def suite(name: str, batch: int | None = None) -> list[Layer]:
    """The layers of a named suite, in network order.

    Args:
        name: one of `suite_names()`.
        batch: images; the default is the suite's own (1, and 8 for papers12, whose source uses 128).

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
        ConvError: `batch` is not a positive integer, or too large for a layer's tensors.
    """
    if name not in SUITES:
        raise ValueError(f"`name` (={name!r}) must be one of {', '.join(SUITES)}.")
    return SUITES[name].layers(batch)
