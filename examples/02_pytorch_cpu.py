"""Run a PyTorch layer's convolution with im2win: the same weights, tensors shared without a copy.

    python examples/02_pytorch_cpu.py
"""

import torch

import im2win


def main() -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1).eval()
    x = torch.randn(4, 32, 56, 56)

    conv = im2win.Conv2d(
        batch=x.shape[0],
        in_channels=module.in_channels,
        height=x.shape[2],
        width=x.shape[3],
        out_channels=module.out_channels,
        kernel=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
        bias=module.bias is not None,
    )
    op = im2win.build(conv, target="cpu")  # a tuning record if there is one, else the default tile
    with torch.inference_mode():
        layer = op.bind(module.weight, module.bias)
        y = layer(x)  # a torch tensor, because x is one
        expected = module(x)

    error = float((y - expected).abs().max() / expected.abs().max())
    assert error < 1e-5, error
    print(f"{op}: {tuple(y.shape)}, largest relative difference to PyTorch {error:.1e}")


if __name__ == "__main__":
    main()
