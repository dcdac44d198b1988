"""Lean files of toy models: neurons in random order, decisions that calibration would take set by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from leanstream_gguf.repack import layout as lean
from leanstream_gguf.repack import writer
from leanstream_gguf.repack.gguf_file import encode_key, read_model


def make_lean(
    source: Path,
    out: Path,
    *,
    cluster_size: int = 3,
    n_hot: int = 2,
    faithful: bool = False,
    margin: float = 1e9,
    thresholds: tuple[tuple[float, float], ...] = (),
) -> Path:
    """Repack `source`: every dense layer that allows it into clusters, experts bundled.

    Args:
        margin: of the sketch; the default makes every neuron a candidate.
        thresholds: (max_kl, threshold of every layer) of each lossy setting.
    """
    model = read_model(str(source))
    rng = np.random.default_rng(7)
    neurons = [
        lean.NeuronLayer(
            ffn.block,
            ffn.gate,
            ffn.up,
            ffn.down,
            ffn.down.type,
            ffn.biases,
            rng.permutation(ffn.down.ne[0]).astype(np.int32),
            cluster_size,
            n_hot,
            4096,
            faithful,
        )
        for ffn in lean.find_dense(model)
        if ffn.why_not is None
    ]
    keys = []
    if neurons:
        n = len(neurons)
        keys += [
            encode_key(f"leanstream.neurons.{name}", "f32[]", [value] * n)
            for name, value in (("density", 0.5), ("amplification", 1.0), ("amplification_best", 1.0))
        ]
        if faithful:
            keys.append(encode_key("leanstream.sketch.margin", "f32[]", [margin] * n))
        if thresholds:
            keys.append(encode_key("leanstream.threshold.max_kl", "f32[]", [kl for kl, _ in thresholds]))
            keys.append(encode_key("leanstream.threshold.kl", "f32[]", [kl for kl, _ in thresholds]))
            keys.append(encode_key("leanstream.threshold.values", "f32[]", [v for _, v in thresholds for _ in range(n)]))
    layout = lean.make_layout(model, lean.find_experts(model), neurons, 4096, keys)
    writer.write(layout, str(out), force=True, quiet=True)
    return out
