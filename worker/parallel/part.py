"""One rank's part of a model: what is left of it before loading, and how it works together with the others after."""

from __future__ import annotations

from transformers import PreTrainedModel

from millrace.worker.errors import ModelError
from millrace.worker.kv_pool import LayerSpec
from millrace.worker.loading.probe import probe_layers
from millrace.worker.parallel.peers import Peers
from millrace.worker.parallel.stages import cut_stages
from millrace.worker.parallel.tensor_plan import Slice, TensorPlan
from millrace.worker.parallel.topology import Topology


class ModelPart:
    """Knows which tensors of a model are whole, in part, or not at all on this rank."""

    def __init__(self, model: PreTrainedModel, topology: Topology) -> None:
        """Cut the modules of a meta model. Raises `ModelError` when it cannot be divided among so many ranks."""
        self.whole_names = frozenset(model.state_dict())
        """All tensors that are stored of the whole model."""
        self._tp_size = topology.tp_size
        self.layers = topology.layers(model.config.num_hidden_layers)
        if topology.pp_size > 1:
            cut_stages(model, topology)
        self._plan: TensorPlan | None = None
        self._undivided: list[LayerSpec] = []
        self.slices: dict[str, Slice] = {}
        """By tensor name, for those of which this rank has a slice."""
        if topology.tp_size > 1:
            self._plan = TensorPlan(model, topology)
            self._undivided = probe_layers(model, self.layers)
            self.slices = self._plan.cut(model)
        self.names = frozenset(model.state_dict())
        """What this rank has of `whole_names`."""

    def whole_layer(self, model: PreTrainedModel, specs: list[LayerSpec]) -> LayerSpec:
        """The first layer as it is over all ranks, given what the loaded part has of each.

        Divided heads have to show in the attention's calls as fewer heads of the same size. Some models count on the
        numbers in their configuration instead; they are refused with a `ModelError`.
        """
        if not self._plan:
            return specs[0]
        for spec, whole in zip(specs, self._undivided, strict=True):
            is_same_size = (spec.key_dim, spec.value_dim) == (whole.key_dim, whole.value_dim)
            if not is_same_size or spec.num_kv_heads not in (whole.num_kv_heads, whole.num_kv_heads // self._tp_size):
                raise ModelError(
                    f"the attention of {model.config.model_type} does not work on a part of its heads: "
                    "use pipeline_parallel_size instead of tensor_parallel_size"
                )
        return self._undivided[0]

    def join(self, model: PreTrainedModel, peers: Peers) -> None:
        """Let the loaded part work together with those of the other ranks."""
        if self._plan:
            self._plan.join(model, peers)
