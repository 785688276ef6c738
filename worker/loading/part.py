"""One rank's part of a model: which modules and tensors it keeps, and how the loaded part communicates."""

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
    """Knows which tensors of a model this rank holds whole, which as a slice, and which not."""

    def __init__(self, model: PreTrainedModel, topology: Topology) -> None:
        """Cut a meta model down to this rank's part. Raises `ModelError` if it cannot be divided so."""
        self.whole_names = frozenset(model.state_dict())
        """Names of all stored tensors of the whole model."""
        self._tp_size = topology.tp_size
        self.layers = topology.layers(model.config.num_hidden_layers)
        self.whole_specs = probe_layers(model) if topology.world_size > 1 else []
        """All layers of the undivided model; empty when this rank holds it whole."""
        if topology.pp_size > 1:
            cut_stages(model, topology)
        self._plan: TensorPlan | None = None
        self.slices: dict[str, Slice] = {}
        """By tensor name, for tensors of which this rank holds a slice."""
        if topology.tp_size > 1:
            self._plan = TensorPlan(model, topology)
            self.slices = self._plan.cut(model)
        self.names = frozenset(model.state_dict())
        """Names of the tensors that this rank holds, whole or as a slice."""

    def check_layers(self, model: PreTrainedModel, specs: list[LayerSpec]) -> None:
        """Raise `ModelError` when the attention of the loaded part, with the layers `specs`, uses the head counts of its
        configuration: divided heads have to appear in the attention calls as fewer heads of the same size."""
        if self._plan is None:
            return
        for spec, whole in zip(specs, [self.whole_specs[index] for index in self.layers], strict=True):
            is_same_size = (spec.key_dim, spec.value_dim) == (whole.key_dim, whole.value_dim)
            if not is_same_size or spec.num_kv_heads not in (whole.num_kv_heads, whole.num_kv_heads // self._tp_size):
                raise ModelError(
                    f"the attention of {model.config.model_type} does not work on a part of its heads: "
                    "use pipeline_parallel_size instead of tensor_parallel_size"
                )

    def join(self, model: PreTrainedModel, peers: Peers) -> None:
        """Replace the divided modules of the loaded part by ones that communicate with the other ranks."""
        if self._plan:
            self._plan.join(model, peers)
