"""ResNet-18, -34 and -50 for images, tensor for tensor as in torchvision, so that its weights load.

The bottleneck is "v1.5": the stride sits in its 3x3 convolution, which trains to better accuracy than the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.config.check import positive
from distributed_training.models.base import Arguments, CheckpointedModule, Shape, read_args, require_num_classes
from distributed_training.runtime.errors import ModelError

SMALL_SIDE = 64
"""Images up to this many pixels a side get the small stem: the usual one would leave almost nothing of them."""


@dataclass(kw_only=True)
class ResNetArguments(Arguments):
    """`model.args` of the resnets."""

    in_channels: int | None = None
    """Channels of the images. Left out, it is read from the dataset, else 3."""
    small_images: bool | None = None
    """A 3x3 stem without stride or pooling. Left out: on for images up to 64 pixels a side, unless pretrained."""

    def check(self) -> None:
        """Refuse images without channels."""
        positive("model.args.in_channels", self.in_channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        activated: Tensor = self.relu(out + shortcut)
        return activated


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones that narrow and widen, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        activated: Tensor = self.relu(out + shortcut)
        return activated


BlockType = type[BasicBlock] | type[Bottleneck]
DEPTHS: dict[str, tuple[BlockType, list[int]]] = {
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
}


class ResNet(CheckpointedModule):
    """A stem, four stages of residual blocks, and a linear head on their average."""

    head_name = "fc"

    def __init__(self, name: str, num_classes: int, *, in_channels: int = 3, small_images: bool = False) -> None:
        super().__init__()
        block, depths = DEPTHS[name]
        self.conv1 = _conv(in_channels, 64, 3) if small_images else _conv(in_channels, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, depths[0], 1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], 2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], 2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, channels, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = self.run_block(block, x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], channels: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    first = block(channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


def build(config: ModelConfig, input_shape: Shape | None) -> ResNet:
    """The resnet that the config names."""
    args = read_args(ResNetArguments, config)
    if input_shape is not None and len(input_shape) != 3:
        raise ModelError(
            f"{config.name} needs images of shape (channels, height, width); the dataset's samples have shape "
            f"{tuple(input_shape)}"
        )
    small_images = args.small_images
    if small_images is None:
        small_images = input_shape is not None and max(input_shape[1:]) <= SMALL_SIDE and not config.pretrained
    return ResNet(
        config.name,
        require_num_classes(config),
        in_channels=args.in_channels or (input_shape[0] if input_shape is not None else 3),
        small_images=small_images,
    )
