"""A small residual CNN for scikit-learn's digits; trains on a CPU in seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


@cache
def load_data() -> tuple[Tensor, Tensor]:
    """All 1,797 digits: images [N, 1, 8, 8] with values from 0 to 1, and labels [N]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


class SmallCNN(nn.Module):
    """Three convolutions, one of them around a shortcut, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * width)
        self.relu3 = nn.ReLU(inplace=True)
        self.fc = nn.Linear(2 * width * 4 * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 1, 8, 8] to scores [N, 10]."""
        x = self.relu1(self.bn1(self.conv1(images)))
        x = self.relu2(self.bn2(self.conv2(x)) + x)
        x = self.relu3(self.bn3(self.conv3(self.pool(x))))
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


def batches(step: int, rows: range, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some rows of the batch of a step: digits drawn at random, the same for the same step."""
    images, labels = load_data()
    generator = torch.Generator().manual_seed(seed * 2**32 + step)
    chosen = torch.randint(0, len(labels), (rows.stop,), generator=generator)[rows.start :]
    return images[chosen], labels[chosen]


def build(
    batch_size: int = 64, width: int = 16, seed: int = 0
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The model, a batch of digits, and the loss."""
    torch.manual_seed(seed)
    images, labels = load_data()
    chosen = torch.randint(0, len(labels), (batch_size,))
    return SmallCNN(width), (images[chosen], labels[chosen]), functional.cross_entropy
