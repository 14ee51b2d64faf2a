"""What the kernels ask of the GPU."""

from __future__ import annotations

import pytest
import torch

from replayssm_quant.kernels.common import check


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
def test_old_gpus_are_named_with_the_remedy(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    device = torch.device("cuda", 0)
    if capability < (8, 9):
        wanted = f"Some GPU has compute capability {capability[0]}.{capability[1]}.*reference"
        with pytest.raises(ValueError, match=wanted):
            check.check_gpu.__wrapped__(device)
    else:
        check.check_gpu.__wrapped__(device)


def test_other_devices_are_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 / 0)
    check.check_gpu(torch.device("cpu"))
