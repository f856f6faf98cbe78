"""The resnets are torchvision's, tensor for tensor (torchvision itself is not needed to check that)."""

from __future__ import annotations

import math

import pytest
import torch

from distributed_training.config import ModelConfig
from distributed_training.models import get_model
from distributed_training.models.resnet import ResNet
from distributed_training.runtime.errors import ModelError

# name: parameters at 1000 classes, entries of the state dict
TORCHVISION = {
    "resnet18": (11_689_512, 122),
    "resnet34": (21_797_672, 218),
    "resnet50": (25_557_032, 320),
}
SHAPES = {
    "resnet18": {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.num_batches_tracked": (),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer2.0.conv1.weight": (128, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.running_mean": (128,),
        "layer4.1.bn2.weight": (512,),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    },
    "resnet34": {
        "layer1.2.conv2.weight": (64, 64, 3, 3),
        "layer2.3.conv2.weight": (128, 128, 3, 3),
        "layer3.5.bn1.running_var": (256,),
        "layer4.2.conv2.weight": (512, 512, 3, 3),
        "fc.weight": (1000, 512),
    },
    "resnet50": {
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.conv2.weight": (64, 64, 3, 3),
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer2.0.downsample.0.weight": (512, 256, 1, 1),
        "layer2.0.downsample.1.running_mean": (512,),
        "layer3.5.bn3.weight": (1024,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.weight": (1000, 2048),
    },
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_same_tensors_as_torchvision(name: str) -> None:
    with torch.device("meta"):
        model = get_model(name)(ModelConfig(num_classes=1000))
    parameters, entries = TORCHVISION[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    state = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert len(state) == entries
    assert SHAPES[name].items() <= state.items()
    assert ("layer1.0.downsample.0.weight" in state) == (name == "resnet50")
    assert "layer2.1.downsample.0.weight" not in state
    assert list(state)[:6] == ["conv1.weight", *(f"bn1.{k}" for k in ("weight", "bias"))] + [
        f"bn1.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")
    ]


def test_stride_is_where_torchvision_has_it() -> None:
    with torch.device("meta"):
        resnet18, resnet50 = ResNet("resnet18", 10), ResNet("resnet50", 10)
    assert (resnet18.layer2[0].conv1.stride, resnet18.layer2[0].conv2.stride) == ((2, 2), (1, 1))
    assert (resnet50.layer2[0].conv1.stride, resnet50.layer2[0].conv2.stride) == ((1, 1), (2, 2))
    assert (resnet18.conv1.stride, resnet18.conv1.padding) == ((2, 2), (3, 3))


def test_initialised_like_torchvision() -> None:
    torch.manual_seed(0)
    model = ResNet("resnet18", 10)
    weight = model.layer3[0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.02)  # kaiming normal, fan out
    assert torch.equal(model.layer4[1].bn2.weight, torch.ones(512))  # zero_init_residual is off


def test_stem_follows_the_image_size() -> None:
    def kernel(shape: tuple[int, ...] | None, **args: object) -> tuple[int, int, str]:
        with torch.device("meta"):
            model = get_model("resnet18")(ModelConfig(num_classes=2, args=args), shape)
        return model.conv1.in_channels, model.conv1.kernel_size[0], type(model.maxpool).__name__

    assert kernel(None) == (3, 7, "MaxPool2d")
    assert kernel((1, 32, 32)) == (1, 3, "Identity")
    assert kernel((3, 64, 64)) == (3, 3, "Identity")
    assert kernel((3, 65, 65)) == (3, 7, "MaxPool2d")
    assert kernel((3, 32, 32), small_images=False) == (3, 7, "MaxPool2d")
    assert kernel((3, 224, 224), small_images=True, in_channels=4) == (4, 3, "Identity")


def test_forward() -> None:
    small = get_model("resnet18")(ModelConfig(num_classes=7), (1, 8, 8)).eval()
    assert small(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    assert small.layer1(small.bn1(small.conv1(torch.rand(1, 1, 8, 8)))).shape == (1, 64, 8, 8)
    assert ResNet("resnet50", 7).eval()(torch.rand(1, 3, 64, 64)).shape == (1, 7)


def test_needs_images() -> None:
    with pytest.raises(ModelError, match=r"resnet18 needs images .* have shape \(64,\)"):
        get_model("resnet18")(ModelConfig(num_classes=2), (64,))
    with pytest.raises(ModelError, match=r"resnet18 needs model\.num_classes"):
        get_model("resnet18")(ModelConfig(), (3, 8, 8))
