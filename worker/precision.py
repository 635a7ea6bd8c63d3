"""Mixed precision on one rank: autocast around user code, and a scaled loss where gradients would vanish (decision
0022).

Parameters, gradients, optimizer state and everything that travels keep the dtypes that the job gave them; only the
operations that torch's autocast lowers are computed in the narrower type.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worker.job import JobError

DTYPES = {"f32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """``f32``, ``bf16`` or ``fp16`` on one device. Raises ``JobError`` for a model that cannot be trained so."""

    def __init__(self, name: str, device: torch.device, model: nn.Module) -> None:
        self._dtype = DTYPES[name]
        self._device = device.type
        self._scaler = self._fresh_scaler() if name == "fp16" else None
        if self._scaler is not None:
            _refuse_half_parameters(model)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What user code runs in. A job's own autocast inside of it goes before."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._dtype)

    def descend(self, loss: Tensor, optimizer: Optimizer) -> bool:
        """Backward, and the optimizer's step: whether that was taken. With ``fp16`` it is left out when a scaled
        gradient is not finite; the scale then halves."""
        scaler = self._scaler
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return True
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not _has_gradients(optimizer):  # the scaler insists on some; there is nothing to scale back either
            optimizer.step()
            return True
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= before

    def restart(self) -> None:
        """Forget a scale that was found on parameters that were spoilt: each of their batches halved it."""
        if self._scaler is not None:
            self._scaler = self._fresh_scaler()

    def state(self) -> dict[str, Any] | None:
        """The scaler's state in plain numbers; none without a scaler."""
        return None if self._scaler is None else dict(self._scaler.state_dict())

    def restore(self, saved: Any) -> str:
        """Take up a saved state; why that cannot be done, in a sentence, or empty. Without a scaler there is nothing to
        take up."""
        if self._scaler is None:
            return ""
        if saved is None:
            return "no loss scale was saved, so it is sought anew"
        known = self._fresh_scaler().state_dict().keys()
        if not isinstance(saved, dict) or saved.keys() != known or not all(map(_usable, saved.values())):
            return "its loss scale cannot be read, so it is sought anew"
        self._scaler.load_state_dict(saved)
        return ""

    def _fresh_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self._device)


def _usable(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _refuse_half_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise JobError(
                "build_failed",
                f"parameter {name} is float16 itself, whose gradients precision fp16 cannot scale back; "
                "build the model in float32, or train it with precision f32",
            )
