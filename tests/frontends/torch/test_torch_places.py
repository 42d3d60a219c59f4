"""Places that compiled programs name in place of parameters: called without Python, and right whatever becomes of the module."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from networks import integers  # noqa: E402
from ways import Ways, right  # noqa: E402

from im2win.frontends.torch import conv_op, native  # noqa: E402
from im2win.frontends.torch.call_site import CallSite  # noqa: E402

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_compiled_programs_call_places_without_python(layout: str, passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on; parameters that change, another input, training and a module that goes away are seen."""
    ways, seen = Ways(layout), []
    now = CallSite.now
    monkeypatch.setattr(CallSite, "now", lambda self, *given: seen.append("now") or now(self, *given))

    place = ways.site.place

    def call(x: Any) -> Any:
        return conv_op.at_site(x, x, place)

    with torch.no_grad():
        right(ways, call)
        right(ways, call)
        passes.clear()
        seen.clear()
        right(ways, call)
        assert not passes and not seen
        ways.module.conv.weight.neg_()
        right(ways, call)
        assert seen == ["now"]
        right(ways, call, integers(1, 5, 9, 7).contiguous(memory_format=torch.channels_last))
        ways.module.norm.train()
        alone = copy.deepcopy(ways.module)
        torch.testing.assert_close(call(ways.x), alone(ways.x))
    assert place in native._introduced
    del ways, call
    gc.collect()
    assert place not in native._introduced
    with pytest.raises(RuntimeError, match="there no more"), torch.no_grad():
        conv_op.at_site(integers(2, 5, 12, 14), None, place)


def test_a_module_whose_layout_changes_keeps_what_compilers_were_told(passes: list[str]) -> None:
    """Filters in another layout since: PyTorch's outputs would follow them, those of a place that was named before may not."""
    ways = Ways("NCHW")
    with torch.no_grad():
        for order in (torch.channels_last, torch.contiguous_format):
            ways.module.to(memory_format=order)
            for layout in (torch.contiguous_format, torch.channels_last):
                x = ways.x.contiguous(memory_format=layout)
                for _ in range(4):
                    y = conv_op.at_site(x, x, ways.site.place)
                    assert torch.equal(y, ways.module(x)) and y.is_contiguous(memory_format=layout)


def test_places_have_shapes_without_a_run() -> None:
    """What compilers are told of an output is what PyTorch gives: batches they do not know, layouts, strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    place = conv_op.Place(-1, (8, 5, 3, 3), True, (2, 1), (1, 1, 1, 1), (1, 2))
    assert conv_op.Place.read(place.text).text == place.text
    y = torch.nn.functional.conv2d(torch.zeros(2, 5, 12, 14), torch.zeros(8, 5, 3, 3), stride=(2, 1), padding=1, dilation=(1, 2))
    with FakeTensorMode():
        found = conv_op.at_site(torch.zeros(2, 5, 12, 14), None, place.text)
    assert found.shape == y.shape and found.is_contiguous(memory_format=torch.channels_last)
