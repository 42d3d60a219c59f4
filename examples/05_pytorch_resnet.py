"""A ResNet in PyTorch on im2win: optimised, checked against PyTorch, its layers reported. No weights are fetched.

    python examples/05_pytorch_resnet.py [DEPTH [SIZE [DEVICE]]]

DEPTH is 18 or 50, SIZE the edge of the image, DEVICE cpu or cuda. Built kernels stay in the cache: the second run compiles nothing.
"""

import sys

import torch
from torch import Tensor, nn

import im2win.torch


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or with a bottleneck 1x1, 3x3 and 1x1; stride on the (first) 3x3."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        widths = (channels, width, width, out) if bottleneck else (channels, width, out)
        strided = kernels.index(3)
        self.convs = nn.ModuleList(
            nn.Conv2d(widths[i], widths[i + 1], k, stride if i == strided else 1, k // 2, bias=False) for i, k in enumerate(kernels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths[1:])
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if i < len(self.convs) - 1:
                y = self.relu(y)
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """He et al., arXiv 1512.03385, with the stride of a bottleneck on its 3x3 convolution, for images [batch, 3, height, width]."""

    def __init__(self, blocks: tuple[int, ...], bottleneck: bool, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        channels, stages = 64, []
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for i in range(count):
                stages.append(Block(channels, width, 2 if stage and i == 0 else 1, bottleneck))
                channels = width * 4 if bottleneck else width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet(depth: int, classes: int = 1000) -> ResNet:
    """ResNet-18 or ResNet-50 with random weights, and statistics of normalisation that are not all 0 and 1."""
    made = {18: lambda: ResNet((2, 2, 2, 2), False, classes), 50: lambda: ResNet((3, 4, 6, 3), True, classes)}
    if depth not in made:
        raise SystemExit(f"DEPTH (={depth}) must be one of {', '.join(map(str, made))}.")
    model = made[depth]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def main(depth: int = 50, size: int = 224, device: str = "cpu") -> None:
    torch.manual_seed(0)
    model = resnet(depth).to(device)
    x = torch.randn(1, 3, size, size, device=device)
    fast = im2win.torch.optimize(model, x)
    print(fast.im2win_report)
    with torch.inference_mode():
        expected, y = model(x), fast(x)
    error = float((y - expected).abs().max() / expected.abs().max())
    assert error < 1e-3, error
    print(f"ResNet-{depth}: largest relative difference to PyTorch {error:.1e}")


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))
