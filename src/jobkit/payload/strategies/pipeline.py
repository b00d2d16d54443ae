"""Pipeline and model parallelism: each rank holds some of the layers, and sends their output on.

pp splits a batch into microbatches, so that all stages work at once; mp sends the whole batch
through one stage after the other. Both run on torch.distributed.pipelining; more ranks than a
pipeline has make copies of it, whose gradients are averaged.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from jobkit.errors import UsageError
from jobkit.payload.distributed import RankEnv
from jobkit.payload.strategies.base import NO_LABEL, Strategy, at_least_fp32, make_mesh
from jobkit.payload.strategies.blocks import filled_up, kept_statistics
from jobkit.payload.strategies.stages import Sendable, check_owners, cut, logits_of
from jobkit.spec.runspec import RunSpec

Schedule = ScheduleGPipe | Schedule1F1B


class Pipeline(Strategy):
    """Layers over ranks, batches in microbatches; a step is that of the undivided model."""

    microbatched = True

    def __init__(self, spec: RunSpec, place: RankEnv, device: torch.device) -> None:
        super().__init__(spec, place, device)
        self.ranks = (self.microbatched and spec.pipeline_stages) or place.world_size
        by_turns = self.microbatched and self.ranks > 1
        self.schedule = spec.pipeline_schedule if by_turns else "gpipe"
        self.data_rank, self.stage_rank = divmod(place.rank, self.ranks)
        self.data_world_size = max(1, place.world_size // self.ranks)
        self.owns_loss = self.stage_rank == self.ranks - 1  # it has the logits
        # Of a forward pass: as said, or the fewest that keep every stage busy.
        share = spec.steps_batch_size // (self.data_world_size * spec.accumulate)
        fitting = (n for n in range(self.ranks, share + 1) if share % n == 0)
        said = spec.microbatches if self.microbatched else 1
        self.microbatches = said or next(fitting, self.ranks)
        self.group: dist.ProcessGroup | None = None  # the ranks of this pipeline
        self.names: list[str] = []  # of this rank's parameters, in order
        self.buffer_names: dict[str, str] = {}
        self.classes = 0
        self._weight = 1.0
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def check(self) -> None:
        super().check()
        spec, world = self.spec, self.place.world_size
        if world % self.ranks:
            raise UsageError(
                f"--pipeline-stages {self.ranks}: {world} ranks do not make whole pipelines"
            )
        if spec.precision == "fp16":
            raise UsageError(
                f"--precision fp16, strategy {self.name}: each stage would scale its own loss; "
                "take bf16, which needs no scale"
            )
        if self.schedule == "1f1b" and self.microbatches < self.ranks:
            # It keeps every stage busy from the start.
            raise UsageError(
                f"--microbatches {self.microbatches}: 1f1b needs one at least for each of "
                f"{self.ranks} stages"
            )
        parts = self.data_world_size * spec.accumulate * self.microbatches
        if self.microbatched and spec.steps_batch_size % parts:
            raise UsageError(
                f"--microbatches {self.microbatches} does not divide the global batch of "
                f"{spec.steps_batch_size} (pipelines: {self.data_world_size}, "
                f"--accumulate: {spec.accumulate})"
            )

    def stages_of(self, model: nn.Module) -> list[nn.Module]:
        return cut(model, self.ranks)

    def waiting(self, stage: int) -> int:
        """Forward passes of a stage that wait for their backward pass, at most.

        GPipe keeps every microbatch; 1F1B one for each stage from this one to the last.
        """
        kept = self.ranks - stage if self.schedule == "1f1b" else self.microbatches
        return min(self.microbatches, kept)

    def step_memory(
        self, model: nn.Module | None, whole: int, shard: int
    ) -> tuple[int | None, int]:
        return None, 0  # what its stages receive, which is known of their passes alone

    def wrap(self, model: nn.Module) -> nn.Module:
        stages = self.stages_of(model)
        check_owners(model, stages)
        blank = torch.zeros(2, 3, 32, 32, dtype=next(model.parameters()).dtype)
        self.classes = logits_of(stages, blank).shape[-1]
        mesh = make_mesh(self, data=self.data_world_size, stage=self.ranks)
        self.data_group, self.group = mesh.get_group("data"), mesh.get_group("stage")
        stage = Sendable(stages[self.stage_rank])
        # Moving may replace a parameter in its module: names go by order, not by identity.
        name_of = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self.names = [name_of[id(p)] for p in stage.parameters()]
        self.buffer_names = {n: name_of.get(id(b), n) for n, b in stage.named_buffers()}
        return self.placed(stage)

    def describe(self) -> list[str]:
        by_turns = f"{self.schedule}, {self.microbatches} microbatches"
        text = f"{self.name}: {self.ranks} stages on {self.ranks} ranks"
        if self.data_world_size > 1:
            text += f", {self.data_world_size} pipelines"
        text += f", {by_turns if self.microbatched else 'one by one'}"
        return [text + "; on one rank this is the same as single" * (self.ranks == 1)]

    def forward_backward(self, images: Tensor, labels: Tensor, weight: float, last: bool) -> Tensor:
        statistics = nullcontext() if len(labels) else kept_statistics(self.model)
        images = filled_up(images, self.microbatches)
        labels = F.pad(labels, (0, len(images) - len(labels)), value=NO_LABEL)
        losses: list[Tensor] = []
        self._weight = weight
        with self.autocast(), statistics:
            self._step(images, training=True, target=labels, losses=losses)
        if last and self.data_world_size > 1:
            self._average_gradients()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        return total + sum(loss.detach() for loss in losses) / weight if self.owns_loss else total

    def predict(self, images: Tensor) -> Tensor:
        count, images = len(images), filled_up(images, self.microbatches)
        with torch.no_grad(), self.autocast():
            logits = self._step(images, training=False)
        if logits is None:
            return images.new_zeros(count, self.classes)
        return at_least_fp32(logits)[:count]

    def clip(self, norm: float) -> None:
        gradients = self._gradients()
        total = torch.stack([g.norm() ** 2 for g in gradients]).sum()
        dist.all_reduce(total, group=self.group)
        factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        torch._foreach_mul_(gradients, factor)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(zip(self.names, self.model.parameters(), strict=True))

    def named_buffers(self) -> dict[str, Tensor]:
        return {self.buffer_names[name]: b for name, b in super().named_buffers().items()}

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"stages": self.ranks}

    def whole(self, gradients: bool = False) -> dict[str, Tensor]:
        parts: list[dict[str, Tensor]] = [{}] * self.ranks
        dist.all_gather_object(parts, super().whole(gradients), group=self.group)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _step(self, images: Tensor, training: bool, **more: Any) -> Tensor | None:
        """Send images through the stages; return the logits on the last rank."""
        key = len(images), training  # what the stages send has one shape in each schedule
        if key not in self._schedules:
            stage = PipelineStage(
                self.model, self.stage_rank, self.ranks, self.device, group=self.group
            )
            # Without a loss there is nothing to go backward for, and the two are the same.
            loss = (lambda *ends: self.loss(*ends) * self._weight) if training else None
            kind = Schedule1F1B if self.schedule == "1f1b" and training else ScheduleGPipe
            self._schedules[key] = kind(stage, self.microbatches, loss_fn=loss, scale_grads=False)
        # Contiguous, as torch 2.11 checks that all batches of a schedule have the same strides.
        first = (images.contiguous(),) if self.stage_rank == 0 else ()
        logits: Tensor | None = self._schedules[key].step(*first, **more)
        return logits

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _average_gradients(self) -> None:
        """The mean over the pipelines, in one message for all of this rank's layers."""
        gradients = self._gradients()
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.data_group)
        flat /= self.data_world_size
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))


class ModelParallel(Pipeline):
    """Layers over ranks, one rank at work at a time: it fits a model, and makes nothing faster."""

    microbatched = False
