"""ResNet-50 (He et al., arXiv 1512.03385; stride in the 3 x 3 convolution) for images.

Parameter names and shapes are those of torchvision's `resnet50`, so its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Bottlenecks of each stage.
DEPTHS = (3, 4, 6, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu3 = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to [N, 4 x width, H / stride, W / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu3(x)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A residual network of bottlenecks.

    Args:
        depths: bottlenecks of each of the four stages.
        classes: numbers that come out.
        width: channels of the first stage.
    """

    def __init__(
        self, depths: Sequence[int] = DEPTHS, classes: int = 1000, width: int = 64
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(inputs, width * 2**stage, stride))
                inputs = width * 2**stage * EXPANSION
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] to scores [N, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def build(
    batch_size: int = 64,
    image_size: int = 224,
    classes: int = 1000,
    channels_last: bool = True,
    seed: int = 0,
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The model, a batch of random images with labels, and the loss."""
    torch.manual_seed(seed)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = ResNet(classes=classes)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch_size, 3, image_size, image_size).to(memory_format=layout)
    labels = torch.randint(0, classes, (batch_size,))
    return model, (images, labels), functional.cross_entropy
