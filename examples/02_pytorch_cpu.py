"""Put a PyTorch module on im2win, and run one of its layers by hand: the same weights, tensors shared without a copy.

    python examples/02_pytorch_cpu.py
"""

import torch
from torch import nn

import im2win
import im2win.torch


def close(y: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((y - expected).abs().max() / expected.abs().max())
    assert error < 1e-5, error
    return error


def main() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()).eval()
    x = torch.randn(4, 32, 56, 56)

    # The module: every convolution with what follows it becomes one operator. A tuning record chooses it, else the model.
    fast = im2win.torch.optimize(module, x)
    print(fast.im2win_report)
    with torch.inference_mode():
        print(f"the module: largest relative difference to PyTorch {close(fast(x), module(x)):.1e}")

    # One layer by hand: a problem, an operator, filters bound once.
    layer = module[0]
    conv = im2win.Conv2d(
        batch=x.shape[0],
        in_channels=layer.in_channels,
        height=x.shape[2],
        width=x.shape[3],
        out_channels=layer.out_channels,
        kernel=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        bias=layer.bias is not None,
    )
    op = im2win.build(conv, target="cpu")
    with torch.inference_mode():
        y = op.bind(layer.weight, layer.bias)(x)  # a torch tensor, because x is one
        print(f"{op}: {tuple(y.shape)}, largest relative difference to PyTorch {close(y, layer(x)):.1e}")


if __name__ == "__main__":
    main()
