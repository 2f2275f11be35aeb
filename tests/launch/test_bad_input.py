"""Bad input as a user meets it: one line on stderr, exit code 2 on every rank, nobody waits, nothing is lost."""

import hashlib
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from tests.launch.forked import Ended, run_ranks
from tests.launch.running import PRETRAIN, PYTHON, ROOT, SAMPLE, environment, losses
from tests.launch.tiny import RUN_LENGTH, SMALL, TINY, TINY_UNET

CONVERT = str(ROOT / "launch/convert.py")
BATCH = 4  # the global batch of the runs on image folders


class Canary:
    """Unpickling one makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def assert_refused(rank: int, world_size: int, code: int, err: str, *parts: str) -> None:
    """One line, the right start, exit code 2, and everything that it should name."""
    start = f"[rank {rank}] megadiff: error: " if world_size > 1 else "megadiff: error: "
    assert code == 2 and err.startswith(start) and err.count("\n") == 1, (code, err)
    for part in parts:
        assert part in err, (part, err)


def refuse(arguments: Sequence[str], folder: Path, *parts: str, script: str = PRETRAIN, world_size: int = 1) -> None:
    """Runs ranks that must all refuse."""
    for rank, ended in enumerate(run_ranks(script, arguments, folder, world_size)):
        assert_refused(rank, world_size, ended.code, ended.err, *parts)


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- settings: refused before torch is imported ----------------------------------------------------------------------

_PIPE = "--pipeline-model-parallel-size"
_TENSOR = "--tensor-model-parallel-size"
SETTINGS: dict[str, tuple[int, list[str], list[str]]] = {
    "misspelt key": (1, ["--train.stpes", "3"], ["--train.stpes", "did you mean --train.steps"]),
    "unknown key": (1, ["--nonsense", "3"], ["unknown argument --nonsense"]),
    "value of a wrong type": (1, ["--train.steps", "many"], ["train.steps", "many", "integer"]),
    "no run folder": (1, [], ["--run-dir"]),
    "world size does not divide": (3, [_TENSOR, "2"], ["world size 3", "2 x", "start 2 or 4 processes"]),
    "heads do not divide": (3, [_TENSOR, "3"], ["= 3", "model.num_heads = 2", "use 1 or 2"]),
    "fewer layers than stages": (8, [_PIPE, "8"], ["= 8", "4 layers", "use at most 4"]),
    "zero 2 with a pipeline": (2, [_PIPE, "2", "--zero-stage", "2"], ["zero_stage = 2", "zero_stage 0 or 1"]),
    "zero 3 with a pipeline": (2, [_PIPE, "2", "--zero-stage", "3"], ["zero_stage = 3", "zero_stage 0 or 1"]),
    "b35 derived accumulation": (
        2, ["--train.micro_batch_size", "3"],
        ["global_batch_size 8", "micro_batch_size 3", "gradient_accumulation_steps derived", "ranks 2", "= 6"],
    ),
    "b35 full triple": (
        2, ["--train.micro_batch_size", "2", "--train.gradient_accumulation_steps", "4"],
        ["global_batch_size 8", "micro_batch_size 2", "gradient_accumulation_steps 4", "data-parallel ranks 2", "= 16"],
    ),
    "unet groups do not divide over the ranks": (
        3, [_TENSOR, "3"], ["= 3", "model.norm_num_groups = 8", "use 1, 2, 4 or 8"]
    ),
    "unet groups do not divide the channels": (
        2, ["--model.norm_num_groups", "12"], ["norm_num_groups = 12", "[16, 32]", "use 1, 2, 4, 8 or 16"]
    ),
    "unet levels do not divide the size": (2, ["--model.input_size", "9"], ["input_size = 9", "use 8 or 10"]),
    "unet too few micro-batches to fold": (
        2, [_PIPE, "2", "--train.gradient_accumulation_steps", "2"], ["folded", "gradient_accumulation_steps", "4"]
    ),
    "unet sequence parallelism without tokens": (
        2, [_TENSOR, "2", "--sequence-parallel"], ["sequence_parallel = true", "model.condition = class"]
    ),
}  # fmt: skip


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """Environment of a shell in which torch and DeepSpeed cannot be imported."""
    modules = tmp_path / "no_torch"
    modules.mkdir()
    for name in ("torch", "deepspeed"):
        (modules / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    return {**environment(), "PYTHONPATH": f"{modules}{os.pathsep}{ROOT}"}


def run_without_torch(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("case", SETTINGS)
def test_b35_a_bad_setting_is_refused_on_every_rank_before_torch(
    case: str, no_torch: dict[str, str], tmp_path: Path
) -> None:
    world_size, flags, parts = SETTINGS[case]
    run_dir = [] if case == "no run folder" else ["--run-dir", str(tmp_path / "run")]
    base = TINY_UNET if case.startswith("unet") else TINY
    command = [PYTHON, PRETRAIN, *base, *flags, *run_dir]
    for rank in {0, world_size - 1}:
        told = {"RANK": str(rank), "WORLD_SIZE": str(world_size)} if world_size > 1 else {}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, env={**no_torch, **told}, capture_output=True, text=True, timeout=300, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert_refused(rank, world_size, done.returncode, done.stderr, *parts)
        used = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
        assert used < 1.0, f"{used:.2f} s of processor time"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["yaml", "json"])
@pytest.mark.parametrize("content", ["misspelt", "pickle"])
def test_b26_a_bad_settings_file_is_refused_before_torch(
    kind: str, content: str, no_torch: dict[str, str], tmp_path: Path
) -> None:
    file, hatched = tmp_path / f"settings.{kind}", tmp_path / "hatched"
    misspelt = {"yaml": b"train:\n  stpes: 3\n", "json": b'{"optimiser": {}}'}[kind]
    file.write_bytes(misspelt if content == "misspelt" else pickle.dumps(Canary(hatched)))
    flag = "--config" if kind == "yaml" else "--deepspeed_config"
    command = [PYTHON, PRETRAIN, flag, str(file), "--run-dir", str(tmp_path / "run")]
    done = run_without_torch(command, no_torch)
    named = {"yaml": "stpes", "json": "optimiser"}[kind] if content == "misspelt" else ""
    assert_refused(0, 1, done.returncode, done.stderr, str(file), named)
    assert not hatched.exists() and not (tmp_path / "run").exists()


def test_a_cut_that_parts_a_skip_from_its_user_is_refused_on_every_rank(tmp_path: Path) -> None:
    flags = [*TINY_UNET, _PIPE, "2", "--parallel.partition", "[1, 1, 1, 13]", "--run-dir", str(tmp_path / "run")]
    refuse(flags, tmp_path, "parallel.partition = [1, 1, 1, 13]", "long skip", "cut symmetrically", world_size=2)


# ---- data ------------------------------------------------------------------------------------------------------------


def write_images(folder: Path, counts: Sequence[int]) -> list[Path]:
    """Class folders with so many random pictures each; returns the files."""
    generator, files = np.random.default_rng(0), []
    for label, count in enumerate(counts):
        (folder / f"class_{label}").mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(256, size=(8, 8, 3), dtype=np.uint8)
            files.append(folder / f"class_{label}/{index}.png")
            Image.fromarray(pixels).save(files[-1])
    return files


def image_flags(images: Path, run_dir: Path, num_classes: int) -> list[str]:
    return [*SMALL, *data_flags(images, run_dir, num_classes)]


def data_flags(images: Path, run_dir: Path, num_classes: int) -> list[str]:
    return [
        "--data.name", "image_folder", "--data.path", str(images), "--model.num_classes", str(num_classes),
        "--train.global_batch_size", str(BATCH), "--run-dir", str(run_dir),
    ]  # fmt: skip


@pytest.mark.parametrize("num_images", [BATCH - 1, BATCH, BATCH + 1])
def test_b07_a_folded_pipeline_ends_with_its_steps_or_an_error_on_every_rank(num_images: int, tmp_path: Path) -> None:
    write_images(tmp_path / "images", [num_images])
    flags = [
        *RUN_LENGTH, "--model.preset", "unet-tiny-test", *data_flags(tmp_path / "images", tmp_path / "run", 1),
        "--pipeline-model-parallel-size", "2",
    ]  # fmt: skip
    if num_images < BATCH:
        refuse(flags, tmp_path, f"{num_images} samples", f"train.global_batch_size = {BATCH}", world_size=2)
        return
    ranks = run_ranks(PRETRAIN, [*flags, "--train.stop_at_step", "3"], tmp_path, 2)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.parametrize("num_images", [0, 1, BATCH - 1, BATCH, BATCH + 1])
def test_b07_a_pipeline_ends_with_its_steps_or_an_error_on_every_rank(num_images: int, tmp_path: Path) -> None:
    write_images(tmp_path / "images", [num_images])
    flags = [*image_flags(tmp_path / "images", tmp_path / "run", 1), "--pipeline-model-parallel-size", "2"]
    if num_images < BATCH:
        parts = (
            [f"{num_images} samples", f"train.global_batch_size = {BATCH}"] if num_images else ["class_0", "no images"]
        )
        refuse(flags, tmp_path, *parts, world_size=2)
        return
    ranks = run_ranks(PRETRAIN, [*flags, "--train.stop_at_step", "3"], tmp_path, 2)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert len(losses(tmp_path / "run")) == 3


def test_an_empty_class_folder_is_named_on_every_rank(tmp_path: Path) -> None:
    write_images(tmp_path / "images", [BATCH, 0])
    flags = image_flags(tmp_path / "images", tmp_path / "run", 2)
    refuse(flags, tmp_path, str(tmp_path / "images/class_1"), "no images", world_size=2)


@pytest.mark.parametrize("damage", ["garbage", "cut", "pickle"])
def test_an_unreadable_image_is_named(damage: str, tmp_path: Path) -> None:
    files, hatched = write_images(tmp_path / "images", [BATCH]), tmp_path / "hatched"
    whole = files[1].read_bytes()
    files[1].write_bytes(
        {"garbage": b"not a picture", "cut": whole[: len(whole) // 2], "pickle": pickle.dumps(Canary(hatched))}[damage]
    )
    refuse(image_flags(tmp_path / "images", tmp_path / "run", 1), tmp_path, str(files[1]))
    assert not hatched.exists()


def test_b36_an_image_that_one_rank_cannot_read_ends_both(tmp_path: Path) -> None:
    """Two data ranks; the other one waits in a collective when the image is met, and must not wait for long."""
    files = write_images(tmp_path / "images", [BATCH])
    files[1].write_bytes(b"not a picture")
    ranks = run_ranks(PRETRAIN, image_flags(tmp_path / "images", tmp_path / "run", 1), tmp_path, 2)
    named = [rank for rank, ended in enumerate(ranks) if str(files[1]) in ended.err]
    assert named, ranks
    for rank in named:
        assert_refused(rank, 2, ranks[rank].code, ranks[rank].err)
    assert all(rank.code != 0 for rank in ranks), ranks


def test_an_image_that_breaks_later_loses_no_step_and_no_checkpoint(tmp_path: Path) -> None:
    files, run_dir = write_images(tmp_path / "images", [BATCH]), tmp_path / "run"
    flags = image_flags(tmp_path / "images", run_dir, 1)
    (trained,) = run_ranks(PRETRAIN, [*flags, "--train.stop_at_step", "2"], tmp_path)
    assert trained.code == 0, trained.err
    before = contents(run_dir / "checkpoints")
    files[1].write_bytes(bytes(files[1].stat().st_size))
    refuse(flags, tmp_path, str(files[1]))
    assert contents(run_dir / "checkpoints") == before and len(losses(run_dir)) == 2


# ---- checkpoints and exports -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder after two steps, which no test may change."""
    folder = tmp_path_factory.mktemp("trained")
    (ended,) = run_ranks(PRETRAIN, [*TINY, "--run-dir", str(folder / "run"), "--train.stop_at_step", "2"], folder)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


TENSORS, INDEX = "rank_00000.safetensors", "index.json"
DAMAGE = {
    "without its tensors": (TENSORS, Path.unlink),
    "without its index": (INDEX, Path.unlink),
    "tensors cut by a byte": (TENSORS, cut),
    "index cut by a byte": (INDEX, cut),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_kept(case: str, world_size: int, run_dir: Path, tmp_path: Path) -> None:
    name, damage = DAMAGE[case]
    damage(find_checkpoint(run_dir) / name)
    before = contents(run_dir)
    refuse([*TINY, "--run-dir", str(run_dir)], tmp_path, name, world_size=world_size)
    assert contents(run_dir) == before


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_neither_sampled_nor_exported(case: str, run_dir: Path, tmp_path: Path) -> None:
    name, damage = DAMAGE[case]
    damage(find_checkpoint(run_dir) / name)
    before = contents(run_dir)
    refuse(["--checkpoint", str(run_dir), "--num-images", "1"], tmp_path, name, script=SAMPLE)
    refuse([str(run_dir), str(tmp_path / "exported"), "--to", "native"], tmp_path, name, script=CONVERT)
    assert contents(run_dir) == before and not (tmp_path / "exported").exists()


@pytest.mark.parametrize("place", [TENSORS, INDEX, "../latest"])
def test_b26_a_pickle_in_a_checkpoint_is_refused_unopened(place: str, run_dir: Path, tmp_path: Path) -> None:
    file, hatched = find_checkpoint(run_dir) / place, tmp_path / "hatched"
    hostile = pickle.dumps(Canary(hatched))
    file.write_bytes(hostile.ljust(file.stat().st_size, b"\0"))
    before = contents(run_dir)
    refuse([*TINY, "--run-dir", str(run_dir)], tmp_path, Path(place).name, world_size=2)
    refuse(["--checkpoint", str(run_dir)], tmp_path, Path(place).name, script=SAMPLE)
    assert contents(run_dir) == before and not hatched.exists()


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "weights.safetensors"])
def test_b26_a_pickle_is_not_imported_under_any_name(name: str, tmp_path: Path) -> None:
    file, hatched = tmp_path / name, tmp_path / "hatched"
    file.write_bytes(pickle.dumps(Canary(hatched)))
    arguments = [str(file), str(tmp_path / "imported"), "--from", "facebookresearch"]
    refuse(arguments, tmp_path, str(file), script=CONVERT)
    assert not hatched.exists() and not (tmp_path / "imported").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_another_network_is_refused_and_kept(world_size: int, trained: Path, tmp_path: Path) -> None:
    before = contents(trained)
    wider = [*TINY, "--model.hidden_size", "64"]
    refuse([*wider, "--run-dir", str(trained)], tmp_path, "hidden_size", "32", "64", world_size=world_size)
    elsewhere = [*wider, "--run-dir", str(tmp_path / "new"), "--resume", str(trained)]
    refuse(elsewhere, tmp_path, "hidden_size", "32", "64", world_size=world_size)
    assert contents(trained) == before


@pytest.mark.parametrize("names", ["native", "facebookresearch"])
def test_an_export_target_that_exists_is_refused_and_kept(names: str, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    refuse([str(trained), str(target), "--to", names], tmp_path, str(target), script=CONVERT)
    assert contents(target) == {"notes.txt": hashlib.sha256(b"mine").hexdigest()}


def test_the_undamaged_run_goes_on(run_dir: Path, tmp_path: Path) -> None:
    """What the tests above start from is good: two ranks continue it to the end."""
    ranks: list[Ended] = run_ranks(PRETRAIN, [*TINY, "--run-dir", str(run_dir)], tmp_path, 2)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert len(losses(run_dir)) == 6
    with CheckpointReader(find_checkpoint(run_dir)) as reader:
        reader.verify()
