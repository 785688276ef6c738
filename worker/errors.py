"""Errors of a rank. Each message is one printable line that names the field or file, and ends with the remedy."""

from __future__ import annotations

from torch.distributed import DistError

from millrace.executor.wire.failures import to_failure

MESSAGE_HEAD, MESSAGE_TAIL = 300, 190
"""Characters that are kept of a longer message. It may quote a model's files, or an error of another library."""


class RankError(Exception):
    """Base of all errors that a rank raises itself."""

    def __init__(self, message: str) -> None:
        line = "".join(character if character.isprintable() else " " for character in message)
        if len(line) > MESSAGE_HEAD + MESSAGE_TAIL:
            line = f"{line[:MESSAGE_HEAD]} ... {line[-MESSAGE_TAIL:]}"
        super().__init__(line)


class ConfigError(RankError):
    """Raised when an option has a value that this version does not know or cannot serve."""


class DeviceError(RankError):
    """Raised when the device that the configuration names cannot be used."""


class RendezvousError(RankError, DistError):
    """Raised when the ranks of a model do not connect to each other. Another attempt, at another port, may succeed."""


class ModelError(RankError):
    """Raised when the model cannot be served: files are missing or damaged, the architecture is not supported, or the
    memory is too small."""


class WeightsDiffer(ModelError):
    """Raised when the names of the stored tensors are not those of the model that config.json describes."""


class WeightsChanged(ModelError):
    """Raised when the weights of a rank that wakes up are not those from before the sleep."""


class PlanError(RankError):
    """Raised when a rank cannot run a step plan: another epoch, no KV pool, or an unsupported operation."""


class StepSkipped(RankError):
    """Raised when a rank is sent a step that was planned before the engine knew of the failure of an earlier one."""


def unsupported(what: str) -> ModelError:
    """A `ModelError` for a model that this version would compute wrongly."""
    return ModelError(f"{what}, which is not supported: use another model")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory of the device or of the host was short, by the classification that the engine sees."""
    return to_failure(error).cause == "out_of_memory"
