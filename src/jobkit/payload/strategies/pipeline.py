"""Pipeline and model parallelism: each rank holds some of the layers, and passes on what they give.

pp cuts a batch into microbatches, so that all stages work at once; mp sends the whole batch through
one stage after the other. Both run on torch.distributed.pipelining; more ranks than a pipeline has
make copies of it, whose gradients are averaged.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from jobkit.payload.clock import Stopwatch
from jobkit.payload.distributed import RankEnv
from jobkit.payload.strategies.base import Strategy, at_least_fp32, full, refuse
from jobkit.payload.strategies.stages import cut, owners, tensors_only
from jobkit.spec.runspec import RunSpec

_ON_ONE_RANK = 2  # stages of the interleaved schedule
_NO_LABEL = -100  # cross_entropy takes no notice of it
Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B


class _BackContiguous(torch.autograd.Function):
    """Nothing going forward; a contiguous gradient going backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Sendable(nn.Module):
    """A stage that gives contiguous results and gradients, as only such tensors can be sent."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the stage gives, a tensor or several."""
        out = self.stage(*(_BackContiguous.apply(x) for x in inputs))
        if isinstance(out, Tensor):
            return out.contiguous()
        return tuple(part.contiguous() for part in out)


class _Stage(PipelineStage):
    """A stage that counts the time of its own passes: all else of a schedule is waiting."""

    def __init__(self, stopwatch: Stopwatch, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stopwatch = stopwatch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch.part("inside"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch.part("inside"):
            return super().backward_one_chunk(*args, **kwargs)


class Pipeline(Strategy):
    """Layers over ranks, batches in microbatches; a step is that of the undivided model."""

    name = "pp"
    measured_by = "inside"
    refuses: ClassVar = {
        "compile": "its stages are traced graphs, which torch compiles anew for each microbatch",
    }

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.ranks = spec.pipeline_stages or place.world_size
        self.order = spec.pipeline_schedule
        self.data_rank, self.stage_rank = divmod(place.rank, self.ranks)
        self.data_world_size = max(1, place.world_size // self.ranks)
        self.counts = self.stage_rank == self.ranks - 1  # it has the logits
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def check(self) -> None:
        super().check()
        spec, world = self.spec, self.place.world_size
        refuse(
            world % self.ranks != 0,
            f"--pipeline-stages {self.ranks}: {world} ranks do not make whole pipelines",
        )
        refuse(
            spec.precision == "fp16",
            f"--precision fp16, strategy {self.name}: each stage would scale its own loss; "
            "take bf16, which needs no scale",
        )
        self.parts = self.microbatches()

    def microbatches(self) -> int:
        """Microbatches of a step on each pipeline. Raises UsageError where they do not divide."""
        spec = self.spec
        share, rest = divmod(spec.steps_batch_size, self.data_world_size * spec.accumulate)
        # 1F1B keeps every stage busy from the start, and so needs one for each.
        least = self.ranks if self.order == "1f1b" else 1
        fitting = [n for n in range(self.ranks, share + 1) if share % n == 0]
        parts = spec.microbatches or next(iter(fitting), self.ranks)
        refuse(
            parts < least,
            f"--microbatches {parts}: 1f1b needs one at least for each of {least} stages",
        )
        refuse(
            rest != 0 or share % parts != 0,
            f"--microbatches {parts} does not divide the global batch of {spec.steps_batch_size} "
            f"(pipelines: {self.data_world_size}, --accumulate: {spec.accumulate})",
        )
        return parts

    def stages_of(self, model: nn.Module) -> list[nn.Module]:
        """The model cut into the pipeline's stages, in order; UsageError where it cannot be."""
        if self.ranks == 1:  # nothing to interleave with
            self.order = "gpipe"
        on_one = _ON_ONE_RANK if self.order == "interleaved" else 1
        self.count = self.ranks * on_one
        names = self.spec.pipeline_split
        return cut(model, self.count, [n.strip() for n in names.split(",")] if names else [])

    def wrap(self, model: nn.Module) -> nn.Module:
        stages = self.stages_of(model)
        self.owners = owners(model, stages)
        blank = torch.zeros(2, 3, 32, 32, dtype=next(model.parameters()).dtype)
        self.classes = tensors_only(stages, blank)[-1]
        shape = (self.data_world_size, self.ranks)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "stage"))
        self.data_group, self.group = mesh.get_group("data"), mesh.get_group("stage")
        self.indices = range(self.stage_rank, self.count, self.ranks)
        kept = nn.ModuleList(Sendable(stages[i]) for i in self.indices)
        # Moving may replace a parameter in its module: names go by order, not by identity.
        self.names = [self.owners[id(p)][0] for p in kept.parameters()]
        of_buffer = {id(b): name for name, b in model.named_buffers()}
        self.buffer_names = {n: of_buffer.get(id(b), n) for n, b in kept.named_buffers()}
        return self.placed(kept)

    def describe(self) -> list[str]:
        copies = f", {self.data_world_size} pipelines" if self.data_world_size > 1 else ""
        same = "; on one rank this is the same as single" if self.count == 1 else ""
        order = f"{self.order}, {self.parts} microbatches" if self.name == "pp" else "one by one"
        lines = [f"{self.name}: {self.count} stages on {self.ranks} ranks{copies}, {order}{same}"]
        for i in range(self.count):
            of = [name for name, stage in self.owners.values() if stage == i]
            modules = dict.fromkeys(name.rpartition(".")[0] or name for name in of)
            lines.append(f"  stage {i}, rank {i % self.ranks}: {', '.join(modules)}")
        return lines

    def forward_backward(self, images: Tensor, labels: Tensor, weight: float, last: bool) -> Tensor:
        images, labels = self._fill(images), self._fill(labels, _NO_LABEL)
        losses: list[Tensor] = []
        self._weight = weight
        schedule = self._schedule(len(labels), training=True)
        with self.autocast():
            schedule.step(*self._first(images), target=labels, losses=losses)
        if last and self.data_world_size > 1:
            self._average_gradients()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        return total + sum(loss.detach() for loss in losses) / weight if self.counts else total

    def predict(self, images: Tensor) -> Tensor:
        count, images = len(images), self._fill(images)
        schedule = self._schedule(len(images), training=False)
        with torch.no_grad(), self.autocast():
            logits = schedule.step(*self._first(images))
        if logits is None:
            return images.new_zeros(count, self.classes)
        return at_least_fp32(logits)[:count]

    def clip(self, norm: float) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        total = torch.stack([g.norm() ** 2 for g in gradients]).sum()
        dist.all_reduce(total, group=self.group)
        factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        torch._foreach_mul_(gradients, factor)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.names, self.model.parameters(), strict=True))

    def named_buffers(self) -> dict[str, Tensor]:
        return {self.buffer_names[name]: b for name, b in super().named_buffers().items()}

    def layout(self) -> dict[str, Any]:
        how = {"stages": self.ranks, "order": self.order, "split": self.spec.pipeline_split}
        return super().layout() | how

    def whole(self, gradients: bool = False) -> dict[str, Tensor]:
        own = {}
        for name, p in self.named_parameters().items():
            grad = p.grad if p.grad is not None else torch.zeros_like(p)
            own[name] = full(grad if gradients else p)
        found: list[dict[str, Tensor]] = [{}] * self.ranks
        dist.all_gather_object(found, own, group=self.group)
        return {name: tensor for part in found for name, tensor in part.items()}

    def _fill(self, tensor: Tensor, value: float = 0) -> Tensor:
        """Make up what the last batch of an epoch lacks to be cut evenly; it weighs nothing.

        Contiguous, as torch 2.11 checks that all batches of a schedule have the same strides.
        """
        tensor = tensor.contiguous()
        lack = -len(tensor) % self.parts if len(tensor) else self.parts
        if lack == 0:
            return tensor
        return torch.cat([tensor, tensor.new_full((lack, *tensor.shape[1:]), value)])

    def _first(self, images: Tensor) -> tuple[Tensor, ...]:
        return (images,) if self.stage_rank == 0 else ()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(
            at_least_fp32(logits), labels, reduction="sum", ignore_index=_NO_LABEL
        )
        return loss * self._weight

    def _schedule(self, samples: int, training: bool) -> Schedule:
        """The schedule for batches of a size: what the stages send has one shape in each."""
        if (samples, training) not in self._schedules:
            stages: list[PipelineStage] = [
                _Stage(self.stopwatch, stage, i, self.count, self.device, group=self.group)
                for i, stage in zip(self.indices, self.model.children(), strict=True)
            ]
            loss = self._loss if training else None
            self._schedules[samples, training] = self._make(stages, loss)
        return self._schedules[samples, training]

    def _make(self, stages: list[PipelineStage], loss: Loss | None) -> Schedule:
        if self.order == "interleaved":
            return ScheduleInterleaved1F1B([*stages], self.parts, loss_fn=loss, scale_grads=False)
        # Without a loss there is nothing to go backward for, and the two are the same.
        kind = Schedule1F1B if self.order == "1f1b" and loss else ScheduleGPipe
        return kind(stages[0], self.parts, loss_fn=loss, scale_grads=False)

    def _average_gradients(self) -> None:
        """The mean over the pipelines, in one message for all of this rank's layers."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.data_group)
        flat /= self.data_world_size
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))


class ModelParallel(Pipeline):
    """Layers over ranks, one rank at work at a time: it fits a model, and makes nothing faster."""

    name = "mp"

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.ranks, self.order = place.world_size, "gpipe"
        self.data_rank, self.stage_rank, self.data_world_size = 0, place.rank, 1
        self.counts = self.stage_rank == self.ranks - 1

    def microbatches(self) -> int:
        return 1
