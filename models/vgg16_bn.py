"""VGG-16 with batch normalisation; names and shapes are those of torchvision's `vgg16_bn`."""

from __future__ import annotations

from functools import partial

import vgg16

build = partial(vgg16.build, batch_norm=True)
