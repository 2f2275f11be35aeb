"""One training engine for every layout: a step in, a loss out; predictions from the raw or the averaged weights."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import Tensor

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.data.batch import Batch
from megadiff.diffusion.levels import Observation
from megadiff.diffusion.objective import DiffusionObjective
from megadiff.dist.grid import Grid
from megadiff.engine.ema import Ema
from megadiff.engine.optimizer import learning_rate, set_learning_rate
from megadiff.engine.output_gradient import OutputGradient
from megadiff.engine.release import release
from megadiff.engine.runners import MicroBatch, Runner
from megadiff.models.chain import mix_seed
from megadiff.models.feature_cache import HitRate
from megadiff.models.sizes import output_channels
from megadiff.parallel.forward import open_predict, predict
from megadiff.parallel.shards import Shards
from megadiff.parallel.stage import Stage
from megadiff.sampling.guidance import Predict

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one optimizer step did, equal on every rank.

    Attributes:
        loss: mean weighted squared error over the global batch, a 0-dim tensor on the device.
        grad_norm: global gradient norm before clipping, a 0-dim tensor or a number.
        lr: the learning rate that the optimizer used.
        applied: False if the step was skipped (fp16 overflow).
        seen: timestep and loss of every sample of the global batch.
    """

    loss: Tensor
    grad_norm: Tensor | float
    lr: float
    applied: bool
    seen: Observation


class Engine:
    """A network under DeepSpeed with its objective, optimizer and moving average.

    Attributes:
        config: the settings of this engine's steps.
        run_config: those of the whole run, of which this may be one stage; what a checkpoint holds.
        shards: which part of each parameter this rank owns.
        ema: the moving average, None when it is switched off.
        steps: optimizer steps taken over the whole life of the run, skipped ones included.
        clip_norm: limit of the gradient norm in the current step, 0 for none.
        samples: samples consumed by all ranks together, which is the position in the data stream.
        skipped_steps: how many steps were skipped.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        grid: Grid,
        stage: Stage,
        deepspeed_engine: deepspeed.DeepSpeedEngine,
        objective: DiffusionObjective,
        runner: Runner,
        gradient: OutputGradient | None,
        shards: Shards,
        device: torch.device,
        run_config: Config | None = None,
    ) -> None:
        self.run_config = run_config or config
        self.config, self.layout, self.grid, self.device = config, layout, grid, device
        self.stage, self.chain, self.deepspeed = stage, stage.chain, deepspeed_engine
        self.objective, self.runner, self.gradient, self.shards = objective, runner, gradient, shards
        self.ema = Ema(config.ema, shards) if config.ema.enabled else None
        self.clip_norm = config.optimizer.clip_norm
        self.clipped_norm: Tensor | None = None
        self.steps = 0
        self.samples = 0
        self.skipped_steps = 0

    @property
    def needs_data(self) -> bool:
        """True on the first and last pipeline stages; the others take everything from their neighbours."""
        return self.grid.is_first_stage or self.grid.is_last_stage

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step on this rank's part of the global batch.

        Args:
            micro_batches: the accumulation's micro-batches of this data rank; on stages that need no data, none.
        """
        rate = learning_rate(self.steps, self.config.train.steps, self.config.optimizer)
        set_learning_rate(self.shards.optimizer, rate)
        self._choose_clip_norm()
        for chain in self.stage.chains():
            chain.dropout_seeds = self._dropout_seeds()
        prepared = [self._prepare(batch.to(self.device)) for batch in micro_batches]
        total = self._global_elements(prepared)
        loss_scale = self.layout.accumulation * self.layout.data / total
        if self.ema is not None:
            self.ema.prepare()
        losses = self.runner.run(prepared, loss_scale)
        applied = self._was_applied()
        self.steps += 1
        self.samples += self.layout.global_batch_size
        if applied and self.ema is not None:
            self.ema.update()
        if not applied:
            self.skipped_steps += 1
        t, shares, squared_gradients = self._of_all_samples(prepared, losses, total)
        size = self.layout.global_batch_size
        seen = self.objective.after_step(self.steps, t.long(), shares * size, squared_gradients * size**2)
        exact = self.config.train.precision == "fp64"
        loss = shares.sum() if exact else shares.sum().float()
        return StepResult(loss, self._grad_norm(), rate, applied, seen)

    def predict(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The network's output without gradients; collective over the ranks of this copy of the network.

        Args:
            x_t: (B, C, H, W). t: (B,) int64 timesteps. labels: conditions, see `megadiff.diffusion.condition`.
        """
        return predict(self.stage, self.grid, output_channels(self.config.model), x_t, t, labels)

    def open_predict(self) -> Predict:
        """`predict` for the calls of one batch of pictures, which may reuse features as `sampling` says."""
        threshold = self.config.sampling.cache_threshold
        return open_predict(self.stage, self.grid, self.config.model, threshold, HitRate())

    def close(self) -> None:
        """Lets go of the network and the optimizer, which DeepSpeed would hold; no step follows."""
        release(self.deepspeed)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The network computes with the moving average inside, and with exactly the former weights afterwards."""
        if self.ema is None:
            yield
            return
        former = {shard.name: shard.master.detach() for shard in self.shards.all}
        if self.layout.zero_stage == 0:  # there the weights are the masters themselves
            former = {name: value.clone() for name, value in former.items()}
        self.shards.publish(self.ema.values)
        try:
            yield
        finally:
            self.shards.publish(former)

    def loss_scale_state(self) -> dict[str, int | float]:
        """The dynamic loss scale of fp16 as counters; empty otherwise."""
        scaler = self._dynamic_scaler()
        return {} if scaler is None else {key: getattr(scaler, key) for key in _SCALER_STATE}

    def restore_loss_scale(self, counters: Mapping[str, int | float]) -> None:
        """Takes back what `loss_scale_state` gave; a checkpoint without it leaves the initial scale."""
        scaler = self._dynamic_scaler()
        if scaler is not None and _SCALER_STATE[0] in counters:
            for key in _SCALER_STATE:
                setattr(scaler, key, counters[key])

    def _dynamic_scaler(self) -> DynamicLossScaler | None:
        scaler = self.deepspeed.optimizer.loss_scaler if self.config.train.precision == "fp16" else None
        return scaler if isinstance(scaler, DynamicLossScaler) else None

    def _prepare(self, batch: Batch) -> MicroBatch:
        inputs = self.objective.prepare(self._exact(batch.images), batch.labels, batch.sample_ids, self.steps)
        return MicroBatch(inputs, batch.sample_ids, batch.mask)

    def _exact(self, images: Tensor) -> Tensor:
        return images.double() if self.config.train.precision == "fp64" else images

    def _dropout_seeds(self) -> Iterator[int] | None:
        """One seed for each micro-batch's forward pass, a function of (seed, step, first sample id)."""
        model = self.config.model
        if model.dropout == 0 and model.attention_dropout == 0:
            return None
        share = self.layout.micro_batch_size * self.layout.accumulation
        start = self.samples + self.grid.data.index * share
        firsts = range(start, start + share, self.layout.micro_batch_size)
        return iter([mix_seed(self.config.train.seed, self.steps, first) for first in firsts])

    def _global_elements(self, prepared: Sequence[MicroBatch]) -> Tensor:
        """Elements of the global batch that the loss counts, at least 1; only exact on ranks that have data."""
        masked = [micro for micro in prepared if micro.mask is not None]
        if not masked:
            per_sample = prepared[0].inputs.target[0].numel() if prepared else 1
            count = torch.tensor(self.layout.global_batch_size * per_sample, device=self.device)
        else:
            counts = [self.objective.num_elements(micro.inputs.target, micro.mask) for micro in prepared]
            count = torch.stack(counts).sum()
            dist.all_reduce(count, group=self.grid.data.group)
        # An integer tensor in a division would round its quotient to float32.
        return count.clamp(min=1).to(torch.float64 if self.config.train.precision == "fp64" else torch.float32)

    def _of_all_samples(self, prepared: Sequence[MicroBatch], losses: Tensor | None, total: Tensor) -> Sequence[Tensor]:
        """Timestep, share of the mean loss, and squared gradient of that share (0 if not measured), of each sample.

        (3, G) float64, equal on all ranks; one rank of each tensor group of the last stage fills in its samples.
        """
        columns = torch.zeros(3, self.layout.global_batch_size, dtype=torch.float64, device=self.device)
        gradients = None if self.gradient is None else self.gradient.take()
        if losses is not None and self.grid.tensor.index == 0:
            shares = (losses / total).double()
            squared = torch.zeros_like(shares) if gradients is None else gradients / total.double().square()
            t = torch.cat([micro.inputs.t for micro in prepared]).double()
            # The positions of a global batch follow each other, so that their remainders are all different.
            rows = torch.cat([micro.sample_ids for micro in prepared]) % self.layout.global_batch_size
            columns[:, rows] = torch.stack((t, shares, squared.double()))
        if dist.get_world_size() > 1:
            dist.all_reduce(columns)
        return columns.unbind()

    def _choose_clip_norm(self) -> None:
        """The limit of this step's gradient norm, 0 for none; DeepSpeed clips by it where ZeRO shards the optimizer."""
        settings = self.config.optimizer
        self.clip_norm = 0.0 if (self.steps + 1) % settings.clip_every_steps else settings.clip_norm
        if self.layout.zero_stage > 0:
            self.deepspeed.optimizer.clip_grad = self.clip_norm

    def _was_applied(self) -> bool:
        return bool(self.deepspeed.was_step_applied())

    def _grad_norm(self) -> Tensor | float:
        if self.clipped_norm is not None:
            return self.clipped_norm
        norm = self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else norm
