"""`llm.stream`: what a streamed model does, and the settings that can change while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from . import measure
from .errors import LeanStreamWarning, StateError
from .runtime import ModelHandle
from .settings import Budget, CacheBudget, StreamConfig
from .stats import Memory, Stats


def tell_cost(fidelity: Mapping[str, Any], *, stacklevel: int) -> None:
    """Say as a warning what a lossy fidelity was measured to cost."""
    if fidelity["name"] != "threshold":
        return
    cost = "an unknown loss: nobody has measured these thresholds"
    if fidelity["kl"] is not None:
        cost = f"a KL divergence of {fidelity['kl']:.3g} nats (limit {fidelity['max_kl']:g}), as measured"
    warnings.warn(f"fidelity threshold costs {cost}", LeanStreamWarning, stacklevel=stacklevel)


class StreamHandle:
    """`llm.stream`: statistics and live settings of a streamed model.

    On a model that was loaded without a budget, `active` is False and everything else raises StateError.
    """

    def __init__(self, handle: ModelHandle | None, config: StreamConfig | None, budget: Budget | None) -> None:
        self._handle = handle
        self.config = config
        self.budget = budget
        self._n_changes = self._n_changes_seen = 0  # of the fidelity

    @property
    def active(self) -> bool:
        return self._handle is not None and not self._handle.closed

    def _require(self) -> ModelHandle:
        if self._handle is None:
            raise StateError("this model is not streamed", remedy="load it with memory_budget=...")
        return self._handle

    def stats(self) -> Stats:
        """Bytes read, hits, misses, stalls and more since loading or `reset_stats()`."""
        return self._require().stats()

    def reset_stats(self) -> None:
        self._require().reset_stats()

    def memory(self) -> Memory:
        """Bytes by purpose."""
        return self._require().memory()

    def plan(self) -> dict[str, Any]:
        """What is pinned, streamed and cached under the budget in force."""
        return self._require().plan_in_force()

    def set_budget(self, value: Budget | int | str, *, cache: CacheBudget | int | str | None = None) -> None:
        """Change the budget while the model runs, up or down; in force when this returns.

        Args:
            value: as `memory_budget` of Llama.
            cache: as `cache_budget` of StreamConfig; None keeps what was configured.

        Raises:
            BudgetError: below the minimum, which is in `limit`; nothing changes then.
        """
        handle = self._require()
        budget = Budget.parse(value)
        assert self.config is not None
        config = self.config if cache is None else dataclasses.replace(self.config, cache_budget=cache)
        handle.set_budget(*measure.resolve(handle, budget, config))
        self.budget, self.config = budget, config

    def set_policy(self, name: str, **params: float) -> None:
        """Change what the expert cache keeps, from now on.

        Args:
            name: `lean` (half_life, margin_weight, prediction_weight), `lfu` (half_life), `lru`, `slru` (protected_share) or
                `hotcold` (hot_share).
        """
        self._require().set_policy(name, params)

    def set_speculation(self, depth: int | str = "auto", stages: int | str = "auto") -> None:
        """Change how far ahead experts and neurons are guessed and read, from the next token on. It never changes the output.

        Args:
            depth: layers, 0 = off, at most 2; `auto` = what pays, found while running.
            stages: 1 = a guess is never corrected until demand; 2 = corrected as its layer comes near; more = and up to
                stages - 2 times within the FFN of the layer before; `auto` = at every chance.

        Raises:
            ArgumentError: out of range.
        """
        self._require().set_speculation(depth, stages)

    def set_fidelity(self, name: str, max_kl: float | None = None) -> None:
        """Change which neurons count as zero, from the next token on. Anything lossy warns with its measured cost.

        The next generation starts from an empty context; states saved before stay what they were computed as.

        Args:
            name: `exact` or `threshold`, where the file has layout exact; `faithful`, where it has that layout.
            max_kl: as in StreamConfig.

        Raises:
            UnsupportedError: the file does not offer it. ArgumentError: no fidelity, or no number.
        """
        handle, config = self._require(), self.config
        assert config is not None
        config = dataclasses.replace(config, fidelity=name, max_kl=max_kl)  # checks
        handle.set_fidelity(name, max_kl)
        self._changed(config)

    def set_thresholds(self, value: float | Mapping[int, float] | None = None, max_kl: float | None = None) -> None:
        """Change what counts as zero under fidelity `threshold`, from the next token on.

        Args:
            value: absolute activations below it count as zero: in every layer, or by layer, where others keep theirs.
            max_kl: alone, the thresholds that were measured for the largest KL divergence up to this one; with `value`, none may
                be above those.

        Raises:
            StateError: another fidelity is in force, in which the output may not change.
            UnsupportedError: the file holds no measured thresholds, or none up to `max_kl`.
            ArgumentError: no such layer, no number, or more than `max_kl` allows.
        """
        handle, config = self._require(), self.config
        assert config is not None
        handle.set_thresholds(value, max_kl)
        self._changed(dataclasses.replace(config, max_kl=handle.fidelity()["max_kl"]))

    def fidelity(self) -> dict[str, Any]:
        """`{"name", "max_kl", "kl", "thresholds": {layer: value}}` in force; None where nothing was measured."""
        return self._require().fidelity()

    def _changed(self, config: StreamConfig) -> None:
        self.config = config
        self._n_changes += 1
        tell_cost(self.fidelity(), stacklevel=4)

    def take_fidelity_changed(self) -> bool:
        """Whether the fidelity changed since the last call."""
        n = self._n_changes
        changed, self._n_changes_seen = n != self._n_changes_seen, n
        return changed

    def speculation(self) -> dict[str, Any]:
        """Depth and stages in force (None = found while running), what was found, and how well guesses met the choices."""
        return self._require().speculation()

    def tracing(self, path: str | os.PathLike[str], **note: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which what each token needs, what was predicted and what had arrived is recorded to a new file."""
        return self._require().tracing(path, **note)

    def pin(self, layer: int, ids: Sequence[int]) -> None:
        """Keep these experts of a layer resident, replacing earlier pins of the layer; an empty list unpins."""
        self._require().pin(layer, ids)
