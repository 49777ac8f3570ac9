"""VGG-16 (Simonyan and Zisserman, arXiv 1409.1556, configuration D) for images.

Parameter names and shapes are those of torchvision's `vgg16`, so its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Channels of the 3 x 3 convolutions of each stage; a stage ends with a pooling.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Thirteen convolutions and three linear layers.

    Args:
        batch_norm: whether a batch normalisation follows each convolution.
        classes: numbers that come out.
        hidden: width of the linear layers.
        dropout: probability with which their outputs are zeroed in training.
    """

    def __init__(
        self,
        batch_norm: bool = False,
        classes: int = 1000,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage in STAGES:
            for outputs in stage:
                layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(outputs))
                layers.append(nn.ReLU(inplace=True))
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] to scores [N, classes]."""
        x = self.avgpool(self.features(images))
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


def build(
    batch_size: int = 64,
    image_size: int = 224,
    classes: int = 1000,
    hidden: int = 4096,
    channels_last: bool = True,
    seed: int = 0,
    batch_norm: bool = False,
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The model, a batch of random images with labels, and the loss."""
    torch.manual_seed(seed)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = VGG(batch_norm=batch_norm, classes=classes, hidden=hidden)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch_size, 3, image_size, image_size).to(memory_format=layout)
    labels = torch.randint(0, classes, (batch_size,))
    return model, (images, labels), functional.cross_entropy
