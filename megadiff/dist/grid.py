"""The grid of processes: every rank has a coordinate on the axes pipe, data and tensor, and a group along each."""

from dataclasses import dataclass

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megadiff.dist.process import quiet_stdout
from megadiff.dist.traffic import Ledger


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as this rank sees it.

    Attributes:
        degree: its size.
        index: this rank's place.
        ranks: the global ranks along it.
        group: of these ranks.
        ledger: of a dry run, where there is no group and collectives are written down instead.
    """

    degree: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    ledger: Ledger | None = None


@dataclass(frozen=True)
class Grid:
    """The axes of this rank, the group of all ranks that share its data (pipe x tensor), and DeepSpeed's own view.

    Attributes:
        is_folded: every pipeline rank runs a stage of the network's first half and its mirror image in the second, so
            that the network ends on the rank where it begins.
    """

    pipe: Axis
    data: Axis
    tensor: Axis
    model_group: dist.ProcessGroup
    topology: PipeModelDataParallelTopology
    mpu: PipelineParallelGrid
    is_folded: bool = False

    @property
    def is_first_stage(self) -> bool:
        return self.pipe.index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipe.index == (0 if self.is_folded else self.pipe.degree - 1)

    @property
    def last_stage_rank(self) -> int:
        """The global rank that holds the end of the network."""
        return self.pipe.ranks[0 if self.is_folded else -1]


def make_grid(pipe: int, data: int, tensor: int, is_folded: bool = False) -> Grid:
    """Makes the process groups of a layout; a collective call on all ranks. pipe * data * tensor is the world size."""
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=data)
    with quiet_stdout():
        mpu = PipelineParallelGrid(topology=topology, process_group=dist.group.WORLD)
    here = topology.get_coord(dist.get_rank())
    return Grid(
        pipe=Axis(pipe, here.pipe, tuple(mpu.pp_group), mpu.get_pipe_parallel_group()),
        data=Axis(data, here.data, tuple(mpu.dp_group), mpu.get_data_parallel_group()),
        tensor=Axis(tensor, here.model, tuple(mpu.slice_group), mpu.get_slice_parallel_group()),
        model_group=mpu.get_model_parallel_group(),
        topology=topology,
        mpu=mpu,
        is_folded=is_folded,
    )
