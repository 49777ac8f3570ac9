"""BERT-base for question answering, GPT-2 small, and one shard of a 70 B decoder.

Sources: Devlin et al., arXiv 1810.04805 (base: 12 layers, width 768, uncased vocabulary);
Radford et al. 2019 (GPT-2: 12 layers, width 768); Llama Team, arXiv 2407.21783 (Llama 3 70 B:
80 layers, width 8192, 64 query and 8 key-value heads, feed-forward 28672, vocabulary 128256).
Attention is written out: product, softmax in fp32, product; scaling and masks are part of the
softmax.
"""

from __future__ import annotations

from problems.shapes import Network

_BERT_VOCABULARY = 30522
_BERT_POSITIONS = 512
_GPT2_VOCABULARY = 50257
_GPT2_POSITIONS = 1024
_WIDTH = 768
_HEADS = 12
_LAYERS = 12

DECODER_LAYERS = 80
_DECODER_WIDTH = 8192
_DECODER_HEADS = 64
_DECODER_KEY_VALUE_HEADS = 8
_DECODER_FEED_FORWARD = 28672
_DECODER_VOCABULARY = 128256


def _attention(
    network: Network,
    name: str,
    query: int,
    key: int,
    value: int,
    *,
    heads: int,
    tokens: int,
    head_width: int,
    dropout: bool,
) -> int:
    """Scores, softmax, dropout and the weighted sum of values."""
    scores = network.batch * heads * tokens * tokens
    reads = list(dict.fromkeys((query, key)))
    last = network.add(f"{name}.scores", "matmul", reads, scores, macs=scores * head_width)
    last = network.pointwise(f"{name}.softmax", "softmax", [last])
    if dropout:
        last = network.pointwise(f"{name}.softmax_dropout", "dropout", [last])
    mixed = network.batch * heads * tokens * head_width
    return network.add(f"{name}.context", "matmul", [last, value], mixed, macs=scores * head_width)


def _feed_forward(network: Network, name: str, read: int) -> int:
    inner = network.linear(f"{name}.up", read, _WIDTH, 4 * _WIDTH, bias=True)
    inner = network.pointwise(f"{name}.gelu", "gelu", [inner])
    inner = network.linear(f"{name}.down", inner, 4 * _WIDTH, _WIDTH, bias=True)
    return network.pointwise(f"{name}.dropout", "dropout", [inner])


def bert_base(batch: int, tokens: int = 384) -> Network:
    """BERT-base with the span head of SQuAD; norms follow each residual addition."""
    network = Network(name="BERT-base", batch=batch, input_bytes=3 * 8 * batch * tokens)
    table = (_BERT_VOCABULARY + _BERT_POSITIONS + 2) * _WIDTH
    norm = 2 * _WIDTH
    last = network.add("embeddings", "embedding", [], batch * tokens * _WIDTH, parameters=table)
    last = network.pointwise("embeddings.norm", "layer_norm", [last], parameters=norm)
    last = network.pointwise("embeddings.dropout", "dropout", [last])
    for number in range(_LAYERS):
        name = f"layer{number}"
        query, key, value = (
            network.linear(f"{name}.{part}", last, _WIDTH, _WIDTH, bias=True)
            for part in ("query", "key", "value")
        )
        inner = _attention(
            network,
            name,
            query,
            key,
            value,
            heads=_HEADS,
            tokens=tokens,
            head_width=_WIDTH // _HEADS,
            dropout=True,
        )
        inner = network.linear(f"{name}.projection", inner, _WIDTH, _WIDTH, bias=True)
        inner = network.pointwise(f"{name}.projection_dropout", "dropout", [inner])
        total = network.pointwise(f"{name}.add1", "add", [inner, last])
        last = network.pointwise(f"{name}.norm1", "layer_norm", [total], parameters=norm)
        total = network.pointwise(f"{name}.add2", "add", [_feed_forward(network, name, last), last])
        last = network.pointwise(f"{name}.norm2", "layer_norm", [total], parameters=norm)
    spans = network.linear("span_head", last, _WIDTH, 2, bias=True)
    network.pointwise("loss", "cross_entropy", [spans])
    return network


def gpt2_small(batch: int, tokens: int = 1024) -> Network:
    """GPT-2 small: norms before each block, one fused product for query, key and value."""
    network = Network(name="GPT-2 small", batch=batch, input_bytes=2 * 8 * batch * tokens)
    table = (_GPT2_VOCABULARY + _GPT2_POSITIONS) * _WIDTH
    norm = 2 * _WIDTH
    last = network.add("embeddings", "embedding", [], batch * tokens * _WIDTH, parameters=table)
    last = network.pointwise("embeddings.dropout", "dropout", [last])
    for number in range(_LAYERS):
        name = f"h{number}"
        inner = network.pointwise(f"{name}.norm1", "layer_norm", [last], parameters=norm)
        fused = network.linear(f"{name}.qkv", inner, _WIDTH, 3 * _WIDTH, bias=True)
        inner = _attention(
            network,
            name,
            fused,
            fused,
            fused,
            heads=_HEADS,
            tokens=tokens,
            head_width=_WIDTH // _HEADS,
            dropout=True,
        )
        inner = network.linear(f"{name}.projection", inner, _WIDTH, _WIDTH, bias=True)
        inner = network.pointwise(f"{name}.projection_dropout", "dropout", [inner])
        last = network.pointwise(f"{name}.add1", "add", [last, inner])
        inner = network.pointwise(f"{name}.norm2", "layer_norm", [last], parameters=norm)
        inner = _feed_forward(network, name, inner)
        last = network.pointwise(f"{name}.add2", "add", [last, inner])
    last = network.pointwise("final_norm", "layer_norm", [last], parameters=norm)
    logits = network.linear("head", last, _WIDTH, _GPT2_VOCABULARY, bias=False, tied=True)
    network.pointwise("loss", "cross_entropy", [logits])
    return network


def decoder_70b(
    batch: int,
    *,
    tokens: int = 2048,
    layers: int = DECODER_LAYERS,
    shards: int = 1,
    embedding: bool = True,
) -> Network:
    """A 70 B decoder, or its last `layers` layers with the head, split over `shards` GPUs.

    Heads, feed-forward columns and vocabulary are divided over the shards (tensor parallel);
    norms are kept whole on each. Without the embedding the stage starts from the activations
    that the stage before it sends.
    """
    width = _DECODER_WIDTH
    head_width = width // _DECODER_HEADS
    heads = _DECODER_HEADS // shards
    key_value = _DECODER_KEY_VALUE_HEADS // shards * head_width
    inner_width = _DECODER_FEED_FORWARD // shards
    vocabulary = _DECODER_VOCABULARY // shards
    elements = batch * tokens * width
    network = Network(name="70 B decoder", batch=batch, input_bytes=8 * batch * tokens)
    if embedding:
        table = vocabulary * width
        last = network.add("embeddings", "embedding", [], elements, parameters=table)
    else:
        last = network.add("received", "input", [], elements)

    def reduced(name: str, read: int) -> int:
        if shards == 1:
            return read
        reads = [read]
        return network.add(f"{name}_sum", "all_reduce", reads, elements, ranks=shards)

    for number in range(DECODER_LAYERS - layers, DECODER_LAYERS):
        name = f"layer{number}"
        norm = network.pointwise(f"{name}.norm1", "rms_norm", [last], parameters=width)
        query = network.linear(f"{name}.query", norm, width, heads * head_width, bias=False)
        key = network.linear(f"{name}.key", norm, width, key_value, bias=False)
        value = network.linear(f"{name}.value", norm, width, key_value, bias=False)
        network.groups.append((f"{name}.query", f"{name}.key", f"{name}.value"))
        inner = _attention(
            network,
            name,
            network.pointwise(f"{name}.query_rotary", "rotary", [query]),
            network.pointwise(f"{name}.key_rotary", "rotary", [key]),
            value,
            heads=heads,
            tokens=tokens,
            head_width=head_width,
            dropout=False,
        )
        inner = network.linear(f"{name}.output", inner, heads * head_width, width, bias=False)
        last = network.pointwise(f"{name}.add1", "add", [last, reduced(f"{name}.output", inner)])
        norm = network.pointwise(f"{name}.norm2", "rms_norm", [last], parameters=width)
        gate = network.linear(f"{name}.gate", norm, width, inner_width, bias=False)
        up = network.linear(f"{name}.up", norm, width, inner_width, bias=False)
        network.groups.append((f"{name}.gate", f"{name}.up"))
        inner = network.pointwise(f"{name}.silu", "silu", [gate])
        inner = network.pointwise(f"{name}.mul", "mul", [inner, up])
        inner = network.linear(f"{name}.down", inner, inner_width, width, bias=False)
        last = network.pointwise(f"{name}.add2", "add", [last, reduced(f"{name}.down", inner)])
    last = network.pointwise("final_norm", "rms_norm", [last], parameters=width)
    logits = network.linear("head", last, width, vocabulary, bias=False)
    network.pointwise("loss", "cross_entropy", [logits])
    return network
