"""What every strategy does: wrap a model, make a microbatch's gradients, evaluate."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from jobkit.errors import UsageError
from jobkit.payload.distributed import RankEnv
from jobkit.payload.recipe import trained_parameters
from jobkit.payload.strategies.blocks import checkpoint_blocks, kept_statistics
from jobkit.permissions import keep_compiler_cache
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import ModelSize

NO_LABEL = -100
FP32 = 4  # bytes of a number, as weights are kept in
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy:
    """A model under one parallel strategy. The training loop knows nothing else of it.

    What is known of a strategy without torch is in its facts (spec/strategies.py). It has a `wrap`,
    and may set the attributes below. Of the other methods it may override:

        before the training  check, describe, make_optimizer, warm_up
        a step               autocast, synchronise, forward_backward, clip, optimizer_step
        an evaluation        share_buffers, predict
        checkpoints          settle, layout, named_parameters, named_buffers, optimizer_state,
                             own_state, take_own_state
        verify               whole
        memory and advice    step_memory, stages_of, size_of
    """

    keeps_gradients = False  # they have their memory before a backward pass, as DDP's buckets do
    casts_parameters = False  # to the run's precision; the others compute under autocast

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        self.spec, self.place, self.device = spec, place, device
        self.name, self.facts = spec.strategy, FACTS[spec.strategy]
        # Ranks that work on the same samples, as those of a pipeline, share their data rank.
        self.data_rank, self.data_world_size = place.rank, place.world_size
        self.data_group: dist.ProcessGroup | None = None  # those ranks; None: all
        self.devices = 1  # GPUs that this process drives
        self.owns_loss = True  # this rank's losses and answers are its own, not another's again
        self.can_fuse = True  # torch's fused optimizer takes the strategy's parameters
        self.offloads = False  # parameters, gradients and optimizer are in the node's memory
        self.dtype = DTYPES.get(spec.precision, torch.float32)  # "auto" is decided before
        self.label_smoothing = 0.2 if spec.speed_run else 0.0
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.model: nn.Module = nn.Identity()
        self.prefix = ""  # what a wrapper puts before the names of the model's tensors
        self.parameter_count = 0  # of the whole model, whatever this rank holds of it
        self.shard_groups: int | None = None  # those that have parameters
        self.normalised = False  # the model has batch normalisation over each rank's own part

    def setup(self, model: nn.Module) -> None:
        """Move the model to the device, wrap it, and compile it where that is wanted.

        Raises UsageError for a setting that the strategy or the model cannot follow.
        """
        self.check()
        self.parameter_count = sum(p.numel() for p in model.parameters())
        norms = {type(m) for m in model.modules() if isinstance(m, _BatchNorm)}
        self.normalised = bool(norms - {nn.SyncBatchNorm})
        if self.spec.activation_checkpointing:
            if self.spec.compile and norms:
                text = "torch cannot compile a model with batch normalisation that is recomputed"
                raise UsageError(f"--compile, --activation-checkpointing: {text}: leave one out")
            checkpoint_blocks(model)
        self.model = self.wrap(model)
        if self.spec.compile:
            keep_compiler_cache()
            self.model.compile(mode=self.spec.compile_mode)

    def check(self) -> None:
        """Raise UsageError, with the reason, for a setting that has no meaning here."""
        for name, reason in self.facts.refuses.items():
            if name in self.spec.differences():
                raise UsageError(f"--{name.replace('_', '-')}, strategy {self.name}: {reason}")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, under the strategy."""
        raise NotImplementedError

    def describe(self) -> list[str]:
        """Lines for a reader: how the model is wrapped."""
        return []

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in the channels-last memory format where that is wanted."""
        if self.spec.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model.to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the run's precision. Weights stay in fp32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def synchronise(self, last: bool) -> AbstractContextManager[object]:
        """Reduce gradients over the ranks in the last microbatch of a step only."""
        return nullcontext()

    def forward_backward(self, images: Tensor, labels: Tensor, weight: float, last: bool) -> Tensor:
        """Add the gradients of weight * (sum of losses) to the model's; return the sum of losses.

        images (N, 3, 32, 32), labels (N,); N may be 0: the rank still takes part in collectives.
        last: this is the last microbatch of the step, so gradients are reduced over the ranks.
        """
        statistics: AbstractContextManager[object] = nullcontext()
        if not len(labels):
            statistics = kept_statistics(self.model)
            images, labels = images.new_zeros(1, 3, 32, 32), labels.new_zeros(1)
            weight = 0.0  # of a sample that is made up
        if self.spec.compile and self.spec.compile_mode != "default":
            # With CUDA graphs: what the last pass gave may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        with statistics, self.synchronise(last):
            with self.autocast():
                logits = self.model(images)
            loss = self.loss(logits, labels)
            self.scaler.scale(loss * weight).backward()
        return loss.detach() * (weight != 0)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the samples' losses; those with the label NO_LABEL have none."""
        return F.cross_entropy(
            at_least_fp32(logits),
            labels,
            reduction="sum",
            ignore_index=NO_LABEL,
            label_smoothing=self.label_smoothing,
        )

    def share_buffers(self) -> None:
        """Make running statistics, such as those of batch normalisation, the ranks' mean.

        Every rank has its own otherwise, and its part of the evaluation would be of another model.
        """
        if self.data_world_size > 1:
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer, group=self.data_group)
                    buffer /= self.data_world_size

    def predict(self, images: Tensor) -> Tensor:
        """Logits (N, classes), in fp32 or more, without gradients; every rank must call as often.

        Where the rank does not count, they mean nothing.
        """
        with torch.no_grad(), self.autocast():
            return at_least_fp32(self.model(images))

    def make_optimizer(self) -> Optimizer:
        """SGD, Adam or AdamW over the strategy's parameters, fused where torch can do that."""
        spec = self.spec
        parameters = trained_parameters(self.model, spec)
        if not parameters:
            raise UsageError(f"--model {spec.model}: has no parameter to train")
        shared: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
        # torch steps sharded parameters one by one unless it is told foreach, which saves a GPU's
        # host most of its launches. On a CPU one by one is faster: each stays in the caches.
        shared |= {"fused": True} if self.can_fuse else {"foreach": self.device.type == "cuda"}
        if spec.optimizer == "sgd":
            shared |= {"momentum": spec.momentum, "nesterov": spec.momentum > 0}
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        return kinds[spec.optimizer](parameters, **shared)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip where wanted, step, and forget the gradients."""
        if self.spec.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            self.clip(self.spec.clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def clip(self, norm: float) -> None:
        """Scale the gradient down to a norm, taken over all of its parts on all ranks."""
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, whole or its shards, by their bare names."""
        return {name.removeprefix(self.prefix): p for name, p in self.model.named_parameters()}

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers that are part of the model's state and on this rank, by bare names."""
        kept = self.model.state_dict(keep_vars=True).keys()
        buffers = self.model.named_buffers()
        return {name.removeprefix(self.prefix): b for name, b in buffers if name in kept}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state of the parameters that this rank steps, live, by bare names.

        All ranks together have that of every parameter: a checkpoint has it whole.
        """
        state, parameters = optimizer.state, self.named_parameters()
        return {name: state[p] for name, p in parameters.items() if p in state}

    def layout(self) -> dict[str, Any]:
        """What decides which rank holds what: where it is the same, so is every rank's part."""
        return {
            "strategy": self.name,
            "world_size": self.place.world_size,
            "nodes": self.place.world_size // self.place.local_world_size,
        }

    def settle(self) -> None:
        """Put parameters where they are between two iterations, from where they are read whole."""

    def warm_up(self) -> None:
        """Do what the first iteration does once and for all, changing no parameter.

        A resumed run has a first iteration a second time; in the others it must compute exactly
        as a run that was never interrupted.
        """

    def own_state(self) -> dict[str, Tensor]:
        """What the strategy keeps from one iteration to the next, beside model and optimizer.

        Parameters and optimizer state of one name are taken as equal on all ranks: what differs
        belongs here. It is called after settle().
        """
        state = self.scaler.state_dict()  # of fp16; empty otherwise
        return {f"scaler.{k}": torch.tensor(v, dtype=torch.float64) for k, v in state.items()}

    def take_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what own_state() gave; what is absent stays unchanged."""
        kept = self.scaler.state_dict()
        given = {
            k: type(v)(state[f"scaler.{k}"]) for k, v in kept.items() if f"scaler.{k}" in state
        }
        self.scaler.load_state_dict(kept | given)

    def whole(self, gradients: bool = False) -> dict[str, Tensor]:
        """Copies of all parameters, or of their gradients, on the CPU, by their bare names.

        Every rank must call; all get all of them, whatever each holds. When the optimizer's step
        begins, the gradients are those of one process, clipped.
        """
        tensors = {}
        for name, p in self.named_parameters().items():
            tensor = p.grad if gradients else p
            tensors[name] = torch.zeros_like(full(p)) if tensor is None else full(tensor)
        return tensors

    def step_memory(
        self, model: nn.Module | None, whole: int, shard: int
    ) -> tuple[int | None, int]:
        """Bytes for communication in a step, at most, and those that its passes count as well.

        model: before `wrap`, of tensors without data; None: only its size is known, from which the
        first may not follow (None). whole, shard: bytes of all gradients, and of this rank's.
        """
        return 0, 0

    def stages_of(self, model: nn.Module) -> list[nn.Module]:
        """The model as the stages that follow each other; UsageError where it cannot be cut."""
        return [model]

    def size_of(self, model: nn.Module) -> ModelSize:
        """What of a model, before `wrap`, decides the messages of a step."""
        return ModelSize(parameters=FP32 * sum(p.numel() for p in model.parameters()))


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in fp32 where it has less: losses are not summed in half precision."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def full(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU, all of its shards together."""
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # which a DTensor has
    return whole.detach().to("cpu", copy=True)


def make_mesh(strategy: Strategy, **dimensions: int) -> DeviceMesh:
    """A mesh of all ranks, whose groups have the run's timeout; torch gives them its own."""
    names, shape = tuple(dimensions), tuple(dimensions.values())
    mesh = init_device_mesh(strategy.device.type, shape, mesh_dim_names=names)
    # Its name since torch 2.14, and before.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=strategy.spec.timeout_s), group)
    return mesh
