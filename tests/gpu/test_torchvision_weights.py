"""Our resnets are torchvision's: needs torchvision, which is on machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from distributed_training.config import ModelConfig
from distributed_training.models import get_model


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_same_names_shapes_and_outputs(name: str) -> None:
    import torchvision

    theirs = getattr(torchvision.models, name)(weights=None).eval()
    ours = get_model(name)(ModelConfig(num_classes=1000)).eval()
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
