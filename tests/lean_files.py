"""Lean files of toy models: neurons in random order, decisions that calibration would take set by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from leanstream_gguf.repack import device, writer
from leanstream_gguf.repack import layout as lean
from leanstream_gguf.repack.gguf_file import encode_key, read_model


def make_lean(
    source: Path,
    out: Path,
    *,
    cluster_size: int = 3,
    n_hot: int = 2,
    faithful: bool = False,
    margin: float = 1e9,
    device_hot: float = 0.0,
    thresholds: tuple[tuple[float, float], ...] = (),
) -> Path:
    """Repack `source`: every dense layer that allows it into clusters, experts bundled.

    Args:
        margin: of the sketch; the default makes every neuron a candidate.
        device_hot: share of the neurons that are stored for a device too.
        thresholds: (max_kl, threshold of every layer) of each lossy setting.
    """
    model = read_model(str(source))
    rng = np.random.default_rng(7)
    neurons = []
    for ffn in lean.find_dense(model):
        if ffn.why_not is None:
            perm = rng.permutation(ffn.down.ne[0]).astype(np.int32)
            heat = rng.integers(0, 100, ffn.down.ne[0], dtype=np.uint32)
            perm, n_device = device.hottest_first(perm, heat, ffn.down.type.n_elements, device_hot)
            neurons.append(
                lean.NeuronLayer(
                    ffn.block, ffn.gate, ffn.up, ffn.down, ffn.down.type, ffn.biases, perm, cluster_size, n_hot, 4096, faithful,
                    n_device=n_device,
                )
            )  # fmt: skip
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
