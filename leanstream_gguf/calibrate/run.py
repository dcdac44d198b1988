"""`calibrate()`: everything in its order, resumable at every window and every finished step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import ArgumentError, UnsupportedError
from ..probe import cpu_count
from ..repack.gguf_file import Model, TensorInfo, read_model
from ..repack.layout import DenseFfn, find_dense
from ..repack.progress import Progress
from ..repack.storage import Source
from ..verify import NOISE_FLOOR
from . import lossy, order
from .graph_tap import Hidden, Taps
from .record import SUFFIX, LayerRecord, Record, Setting, identity
from .runner import N_WINDOW, Runner, Text, compare, tokenise
from .statistics import Gathered

DEFAULT_N_TOKENS = 4096
N_FIT, N_HELD = 2, 2  # windows for choosing settings, and for measuring them and the noise floor
N_SAMPLE = 512  # tokens of bitmaps kept in the record
ZERO_SHARE = 0.4  # of neurons at exactly zero from which a layer counts as sparse

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What to calibrate. `text` None uses the text that comes with the package."""

    model: str
    out: str | None = None
    text: str | None = None  # path
    n_tokens: int = DEFAULT_N_TOKENS
    max_kl: tuple[float, ...] = ()
    sketch: bool = True
    n_threads: int | None = None
    quiet: bool = False

    @property
    def out_path(self) -> str:
        return self.out or default_path(self.model)


def default_path(model: str) -> str:
    return model.removesuffix(".gguf") + SUFFIX


def load_text(path: str | None) -> tuple[str, str]:
    """(name, text).

    Raises:
        ArgumentError: it cannot be read as UTF-8.
    """
    if path is None:
        return "built in", resources.files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
    try:
        return Path(path).name, Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the text {path}: {error}", path=path) from error


class _Stages:
    """Results of finished steps, in the work folder."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        self.path, self.work = folder / "stages.json", work
        self.found: dict[str, Any] = {}
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document.get("work") == work:
                self.found = document["found"]
        except (OSError, ValueError, KeyError):
            pass

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make()`, plain JSON data, made once."""
        if name not in self.found:
            self.found[name] = make()
            temporary = self.path.with_suffix(".new")
            temporary.write_text(json.dumps({"work": self.work, "found": self.found}), encoding="utf-8")
            os.replace(temporary, self.path)
        result: T = self.found[name]
        return result

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Calibration:
    """One run; `run()` does it all."""

    def __init__(self, request: Request, runner: Runner, model: Model, text: Text, ffns: list[DenseFfn]) -> None:
        self.request, self.runner, self.model, self.text = request, runner, model, text
        self.ffns = {ffn.block: ffn for ffn in ffns}
        self.work: dict[str, Any] = {
            "model": identity(model),
            "text": text.sha256,
            "n_windows": len(text.windows),
            "blocks": sorted(self.ffns),
        }
        self.folder = Path(request.out_path + ".work")
        widths = {block: ffn.down.ne[0] for block, ffn in self.ffns.items()}
        self.gathered = Gathered(self.folder, self.work, widths, len(text.windows), N_WINDOW)
        self.finished: list[Gathered] = []
        self.stages = _Stages(self.folder, {**self.work, "max_kl": list(request.max_kl)})
        self.inputs = lossy.Inputs.sized(len(self.ffns), runner.shape.n_embd)

    # ---- windows: the first are for choosing, the last for measuring

    @property
    def held(self) -> list[list[int]]:
        return self.text.windows[-min(N_HELD, len(self.text.windows) // 2) :]

    @property
    def fit(self) -> list[list[int]]:
        return self.text.windows[: min(N_FIT, len(self.text.windows) - len(self.held))]

    def run(self) -> Record:
        self._gather("gathering", self._fires_as_computed)
        noise = self.stages.once("noise", self._noise)
        has_zeros = bool(self._sparse_blocks())
        settings = [Setting.from_dict(item) for item in self._settings()]
        if not has_zeros and not settings:
            raise UnsupportedError(self._why_nothing())
        if not has_zeros:
            self._gather_again(max(settings, key=lambda setting: setting.max_kl))
        record = self._record(noise, has_zeros)
        record.settings = settings
        if has_zeros and self.request.sketch:
            found = self.stages.once("margins", lambda: self._margins(noise["kl"]))
            record.margins = {int(block): value for block, value in found["margins"].items()}
            record.faithful = {key: value for key, value in found.items() if key != "margins"}
        return record

    def clean(self) -> None:
        self.stages.remove()
        for gathered in (self.gathered, *self.finished):
            gathered.remove()

    def _why_nothing(self) -> str:
        kinds = sorted(set(self.runner.tap.activation.values()))
        return (
            f"{self.request.model} has no neurons that stay at exactly zero ({', '.join(kinds)}: {1 - self._density():.1%} zeros): "
            "without loss it streams best layer by layer from the file as it is. To leave out small neurons at a measured cost, "
            "calibrate with --max-kl 0.05 or so"
        )

    def _density(self) -> float:
        counts = self.gathered.counts
        tokens = self.gathered.done * N_WINDOW
        return float(np.mean([c.fired.mean() for c in counts.values()])) / max(1, tokens)

    def _sparse_blocks(self) -> list[int]:
        tokens = max(1, self.gathered.done * N_WINDOW)
        return [block for block, c in self.gathered.counts.items() if 1 - float(c.fired.mean()) / tokens >= ZERO_SHARE]

    # ---- passes over the text

    @staticmethod
    def _fires_as_computed(hidden: Hidden) -> Any:
        return hidden.values != 0

    def _gather(self, what: str, fires: Callable[[Hidden], Any]) -> None:
        gathered, runner = self.gathered, self.runner
        progress = Progress(what, self.text.n_tokens, unit="tokens", quiet=self.request.quiet)
        progress.skip(sum(map(len, self.text.windows[: gathered.done])))
        at: dict[int, int] = {}  # by block: tokens of the window seen; a batch may come in several micro-batches

        def hidden(item: Hidden) -> None:
            if item.block in gathered.counts:
                first = at.get(item.block, 0)
                gathered.counts[item.block].add(item, histogram=True)
                gathered.put_bits(item.block, gathered.done, first, fires(item))
                at[item.block] = first + len(item.values)

        runner.tap.taps = Taps(hidden=hidden)
        try:
            for window in self.text.windows[gathered.done :]:
                runner.start_window("tapped")
                at.clear()
                for first, tokens in runner.pieces(window):
                    runner.decode("tapped", tokens, first)
                    progress.add(len(tokens))
                gathered.window_done()
        finally:
            runner.tap.taps = Taps()
        progress.finish()

    def _gather_again(self, setting: Setting) -> None:
        """Bitmaps of the neurons that a threshold lets through."""
        work = {**self.work, "thresholds": sorted(setting.thresholds.items())}
        self.finished.append(self.gathered)
        self.gathered = Gathered(self.folder / "again", work, self.gathered.widths, len(self.text.windows), N_WINDOW)
        self._gather("once more, with thresholds", lambda hidden: np.abs(hidden.decided) >= setting.thresholds[hidden.block])

    def _noise(self) -> dict[str, Any]:
        progress = Progress("noise floor", len(self.held) * N_WINDOW, unit="tokens", quiet=self.request.quiet)
        costs = compare(self.runner, self.held, "plain", "flash")
        progress.add(len(self.held) * N_WINDOW)
        progress.finish()
        perplexity = float(np.exp(costs.nll_reference / max(1, costs.n_targets)))
        if costs.mean_kl == 0:
            return {"kl": NOISE_FLOOR, "reason": "flash attention on and off give the same bytes", "perplexity": perplexity}
        return {"kl": costs.mean_kl, "reason": "flash attention on against off", "perplexity": perplexity}

    def _settings(self) -> list[dict[str, Any]]:
        n_tokens = (lossy.SEARCH_STEPS * len(self.fit) + len(self.held)) * N_WINDOW
        tried: dict[float, float] = {}
        found = []
        for max_kl in self.request.max_kl:

            def search(max_kl: float = max_kl) -> dict[str, Any]:
                progress = Progress(f"thresholds for a KL of {max_kl:g}", n_tokens, unit="tokens", quiet=self.request.quiet)
                looking = lossy.Search(self.runner, self.fit, self.gathered.counts, progress.add, tried)
                thresholds = looking.find(max_kl)
                setting = lossy.measure_setting(self.runner, self.held, max_kl, thresholds, progress.add)
                progress.finish()
                return setting.to_dict()

            found.append(self.stages.once(f"kl {max_kl:g}", search))
        return found

    def _margins(self, noise_floor: float) -> dict[str, Any]:
        """The loosest margins whose KL stays within the noise floor, or is no larger than that of the finest ones."""
        self._take_inputs()
        blocks = [block for block in self._sparse_blocks() if self.ffns[block].why_not is None]
        deciding: dict[int, TensorInfo] = {block: self.ffns[block].gate or self.ffns[block].up for block in blocks}
        squared = any(self.runner.tap.activation[block] == "SQR" for block in blocks)
        n_tokens = len(lossy.LOSSES) * len(self.held) * N_WINDOW
        progress = Progress("sketch margins", n_tokens, unit="tokens", quiet=self.request.quiet)
        with Source(self.model.shards) as source:
            sketches = lossy.Sketches(self.model, source, deciding)
            by_loss = sketches.margins(self.inputs, lossy.LOSSES, squared=squared)
            limit, best = noise_floor, None
            for loss in lossy.LOSSES:
                tried = lossy.measure_margins(self.runner, self.held, sketches, by_loss[loss], progress.add)
                limit = max(limit, tried[0].mean_kl) if best is None else limit
                if tried[0].mean_kl > limit:
                    break
                best = (loss, *tried)
        assert best is not None
        loss, costs, used, picked = best
        progress.finish()
        return {
            "margins": {str(block): value for block, value in by_loss[loss].items()},
            "loss": loss,
            "kl": costs.mean_kl,
            "perplexity_change": costs.perplexity_change,
            "recall": used.recall,
            "share_picked": picked.share,
            "share_fired": used.share,
            "within_noise_floor": costs.mean_kl <= noise_floor,
        }

    def _take_inputs(self) -> None:
        self.runner.tap.taps = Taps(entering=self.inputs.take)
        try:
            for window in self.fit:
                self.runner.start_window("tapped")
                for first, tokens in self.runner.pieces(window):
                    self.runner.decode("tapped", tokens, first)
        finally:
            self.runner.tap.taps = Taps()

    # ---- the record

    def _record(self, noise: dict[str, Any], has_zeros: bool) -> Record:
        progress = Progress("ordering", len(self.ffns), unit="layers", quiet=self.request.quiet)
        layers = []
        for block, ffn in self.ffns.items():
            if ffn.why_not is None:
                layers.append(self._layer(block))
            progress.add(1)
        progress.finish()
        return Record(
            model_name=os.path.basename(self.request.model),
            model_identity=self.work["model"],
            arch=str(self.model.get("general.architecture")),
            corpus_name=self.text.name,
            corpus_sha256=self.text.sha256,
            n_tokens=self.text.n_tokens,
            noise_floor=noise["kl"],
            noise_floor_reason=noise["reason"],
            perplexity=noise["perplexity"],
            gated=any(ffn.gate is not None for ffn in self.ffns.values()),
            has_zeros=has_zeros,
            layers=layers,
        )

    def _layer(self, block: int) -> LayerRecord:
        counts, n_ff = self.gathered.counts[block], self.ffns[block].down.ne[0]
        bits = self.gathered.layer_bits(block)
        n_sample = min(N_SAMPLE, len(bits) // 4)
        for_order, sample = bits[:-n_sample], bits[-n_sample:]
        perm = order.coactivation_order(for_order, n_ff)
        fires = np.unpackbits(sample, axis=1, bitorder="little")[:, :n_ff]
        fired = order.count_bits(bits)
        both = order.count_bits(bits[1:] & bits[:-1]).sum()
        return LayerRecord(
            block=block,
            n_ff=n_ff,
            activation=self.runner.tap.activation.get(block, ""),
            density=float(fired.sum()) / (len(bits) * n_ff),
            reuse=float(both) / max(1, float(fired[1:].sum())),
            perm=perm,
            fired=counts.fired,
            mean_abs=(counts.sum_abs / max(1, self.text.n_tokens)).astype(np.float32),
            sample=np.packbits(fires[:, perm], axis=1, bitorder="little"),
        )


def calibrate(request: Request) -> Record:
    """Run the model over a text and write the record beside it (or to `request.out`).

    Raises:
        UnsupportedError: nothing in the model can be skipped without loss, and no KL was asked for.
        CalibrationError, ArgumentError, and what loading raises.
    """
    if any(not 0 < value < 10 for value in request.max_kl):
        raise ArgumentError("--max-kl must be a KL divergence in nats, such as 0.05")
    name, text = load_text(request.text)
    model = read_model(request.model)
    ffns = [ffn for ffn in find_dense(model) if ffn.why_not is None]
    if not ffns:
        reasons = sorted({ffn.why_not for ffn in find_dense(model) if ffn.why_not})
        what = (
            f"its dense layers cannot be cut into neurons ({'; '.join(reasons)})" if reasons else "it has no dense feed-forward layers"
        )
        raise UnsupportedError(
            f"{request.model} needs no calibration: {what}", remedy="`leanstream repack` bundles experts without one"
        )
    with Runner(request.model, n_threads=request.n_threads or cpu_count()) as runner:
        digest = hashlib.sha256(text.encode()).hexdigest()
        windows = tokenise(runner, text, name, digest, request.n_tokens)
        calibration = Calibration(request, runner, model, windows, ffns)
        record = calibration.run()
        record.save(request.out_path)
        calibration.clean()
    return record
