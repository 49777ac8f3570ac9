"""ResNet-18, ResNet-50 and VGG-16 with batch norm, at 224 x 224, as torchvision builds them.

Sources: He et al., arXiv 1512.03385 (ResNet-50 with the stride in the 3 x 3 convolution, as
torchvision and QSync train it); Simonyan and Zisserman, arXiv 1409.1556 (configuration D).
"""

from __future__ import annotations

from dataclasses import dataclass

from problems.shapes import Network

_SIDE = 224
_CLASSES = 1000
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


@dataclass
class _Image:
    """The tensor that the next layer reads: its layer index, channels and side length."""

    index: int
    channels: int
    side: int


def _start(name: str, batch: int) -> tuple[Network, _Image]:
    elements = batch * 3 * _SIDE * _SIDE
    network = Network(name=name, batch=batch, input_bytes=4 * elements + 8 * batch)
    return network, _Image(network.add("images", "input", [], elements), 3, _SIDE)


def _conv(
    network: Network,
    name: str,
    image: _Image,
    channels: int,
    size: int,
    stride: int = 1,
    *,
    bias: bool = False,
) -> _Image:
    side = image.side // stride
    weight = image.channels * channels * size * size
    pixels = network.batch * side * side
    index = network.add(
        name,
        "conv2d",
        [image.index],
        pixels * channels,
        macs=pixels * weight,
        weight_elements=weight,
        parameters=weight + (channels if bias else 0),
    )
    return _Image(index, channels, side)


def _norm(network: Network, name: str, image: _Image) -> _Image:
    index = network.pointwise(name, "batch_norm", [image.index], parameters=2 * image.channels)
    return _Image(index, image.channels, image.side)


def _relu(network: Network, name: str, image: _Image) -> _Image:
    return _Image(network.pointwise(name, "relu", [image.index]), image.channels, image.side)


def _max_pool(network: Network, name: str, image: _Image) -> _Image:
    side = image.side // 2
    elements = network.batch * image.channels * side * side
    # torch keeps the position of each maximum as int64.
    index = network.add(name, "max_pool", [image.index], elements, mask_bytes=8 * elements)
    return _Image(index, image.channels, side)


def _average_pool(network: Network, image: _Image, side: int) -> _Image:
    elements = network.batch * image.channels * side * side
    index = network.add("avgpool", "avg_pool", [image.index], elements)
    return _Image(index, image.channels, side)


def _loss(network: Network, read: int) -> None:
    network.pointwise("loss", "cross_entropy", [read])


def _residual(network: Network, name: str, entry: _Image, inner: _Image, stride: int) -> _Image:
    """The skip of a block, its addition and the ReLU behind it."""
    if stride != 1 or entry.channels != inner.channels:
        entry = _conv(network, f"{name}.downsample.0", entry, inner.channels, 1, stride)
        entry = _norm(network, f"{name}.downsample.1", entry)
    total = network.pointwise(f"{name}.add", "add", [inner.index, entry.index])
    return _relu(network, f"{name}.relu_out", _Image(total, inner.channels, inner.side))


def _stem(name: str, batch: int) -> tuple[Network, _Image]:
    network, image = _start(name, batch)
    image = _conv(network, "conv1", image, 64, 7, 2)
    image = _relu(network, "relu", _norm(network, "bn1", image))
    return network, _max_pool(network, "maxpool", image)


def _head(network: Network, image: _Image) -> Network:
    pooled = _average_pool(network, image, 1)
    _loss(network, network.linear("fc", pooled.index, image.channels, _CLASSES, bias=True))
    return network


def resnet18(batch: int) -> Network:
    """ResNet-18: basic blocks of two 3 x 3 convolutions, (2, 2, 2, 2) of them."""
    network, image = _stem("ResNet-18", batch)
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            stride = 2 if block == 0 and stage > 1 else 1
            inner = _conv(network, f"{name}.conv1", image, width, 3, stride)
            inner = _relu(network, f"{name}.relu1", _norm(network, f"{name}.bn1", inner))
            inner = _conv(network, f"{name}.conv2", inner, width, 3)
            inner = _norm(network, f"{name}.bn2", inner)
            image = _residual(network, name, image, inner, stride)
    return _head(network, image)


def resnet50(batch: int) -> Network:
    """ResNet-50: bottlenecks of 1 x 1, 3 x 3 and 1 x 1, (3, 4, 6, 3) of them."""
    network, image = _stem("ResNet-50", batch)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if block == 0 and stage > 1 else 1
            inner = _conv(network, f"{name}.conv1", image, width, 1)
            inner = _relu(network, f"{name}.relu1", _norm(network, f"{name}.bn1", inner))
            inner = _conv(network, f"{name}.conv2", inner, width, 3, stride)
            inner = _relu(network, f"{name}.relu2", _norm(network, f"{name}.bn2", inner))
            inner = _conv(network, f"{name}.conv3", inner, 4 * width, 1)
            inner = _norm(network, f"{name}.bn3", inner)
            image = _residual(network, name, image, inner, stride)
    return _head(network, image)


def vgg16_bn(batch: int) -> Network:
    """VGG-16 with batch norm: thirteen 3 x 3 convolutions and three linear layers."""
    network, image = _start("VGG-16-BN", batch)
    for stage, (width, convolutions) in enumerate(_VGG16, start=1):
        for number in range(convolutions):
            name = f"features{stage}.{number}"
            image = _conv(network, f"{name}.conv", image, width, 3, bias=True)
            image = _relu(network, f"{name}.relu", _norm(network, f"{name}.bn", image))
        image = _max_pool(network, f"features{stage}.pool", image)
    last = image.index  # adaptive pooling to 7 x 7 changes nothing at this input size
    inputs = image.channels * image.side * image.side
    for number in range(2):
        last = network.linear(f"classifier.{number}", last, inputs, 4096, bias=True)
        last = network.pointwise(f"classifier.{number}.relu", "relu", [last])
        last = network.pointwise(f"classifier.{number}.dropout", "dropout", [last])
        inputs = 4096
    _loss(network, network.linear("classifier.2", last, inputs, _CLASSES, bias=True))
    return network
