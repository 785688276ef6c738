"""What a rank can refuse or fail at. Every message is one sentence that names the remedy."""

from __future__ import annotations

from torch.distributed import DistError


class RankError(Exception):
    """Base of all errors that a rank raises itself."""


class ConfigError(RankError):
    """Raised when an option has a value that this version does not know or cannot serve."""


class DeviceError(RankError):
    """Raised when the device that the configuration names cannot be used."""


class RendezvousError(RankError, DistError):
    """Raised when the ranks of a model do not find each other; another attempt, at another port, may succeed."""


class ModelError(RankError):
    """Raised when the model cannot be served: its files are missing or damaged, its architecture is not supported, or
    it does not fit into the memory."""


class WeightsDiffer(ModelError):
    """Raised when the stored tensors are not those of the model that config.json describes, by their names."""


class WeightsChanged(ModelError):
    """Raised when a rank wakes up and its weights are not those with which it went to sleep."""


class PlanError(RankError):
    """Raised when a step plan cannot be run here: another epoch, no KV pool yet, or work this rank cannot do."""
