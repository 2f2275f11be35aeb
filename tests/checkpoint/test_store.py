"""Save with one layout, read with another; and what may be published."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megadiff.checkpoint import (
    CheckpointReader,
    Piece,
    RankManifest,
    begin_save,
    build_index,
    checkpoint_folder,
    find_checkpoint,
    has_checkpoint,
    publish,
    whole_piece,
    write_rank_file,
)
from megadiff.config.load import load_config
from megadiff.errors import CheckpointError
from tests.checkpoint.saving import save, some_tensors


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_b22_any_layout_reads_what_any_other_wrote(tmp_path: Path, ranks: int) -> None:
    kinds = {"model": some_tensors(1), "ema": some_tensors(2), "optimizer.exp_avg": some_tensors(3)}
    with CheckpointReader(save(tmp_path, 7, kinds, ranks=ranks)) as reader:
        reader.verify()
        assert reader.kinds() == sorted(kinds)
        assert reader.index.counters == {"step": 7, "samples": 448, "ema_updates": 7}
        assert reader.config() == load_config(None)
        for kind, tensors in kinds.items():
            assert set(reader.names(kind)) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(reader.read(kind, name), tensor)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_ranges_of_slices_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A tensor-parallel slice on any dim, a ZeRO range in it, read from a file written by another split."""
    tensor = torch.arange(6 * 5 * 4).view(6, 5, 4)
    folder = save(tmp_path_factory.mktemp("run"), 1, {"model": {"w": tensor}}, ranks=data.draw(st.integers(1, 4)))
    offset = [data.draw(st.integers(0, extent - 1)) for extent in tensor.shape]
    size = [data.draw(st.integers(1, e - o)) for e, o in zip(tensor.shape, offset, strict=True)]
    part = tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1)
    start = data.draw(st.integers(0, part.numel()))
    stop = data.draw(st.integers(start, part.numel()))
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.read_range("model", "w", offset, size, start, stop), part[start:stop])


def test_a_box_reads_only_the_files_that_it_touches(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {"model": {"w": torch.arange(12).view(4, 3)}}, ranks=2)
    reader = CheckpointReader(folder)
    (folder / "rank_00001.safetensors").unlink()
    assert reader.read_box("model", "w", (0, 1), (2, 2)).tolist() == [[1, 2], [4, 5]]
    with pytest.raises(CheckpointError, match="rank_00001"):
        reader.read_box("model", "w", (1, 0), (2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    read = CheckpointReader(save(tmp_path, 1, {"model": {"w": tensor}})).read("model", "w")
    assert read.dtype == dtype and torch.equal(read, tensor)


def test_b24_tied_tensors_are_all_stored(tmp_path: Path) -> None:
    """Two pairs of ties, and views into one flat buffer: every name comes back with its own values."""
    one, two, flat = torch.randn(3, 2), torch.randn(3, 2), torch.arange(10.0)
    tensors = {"a": one, "b": one, "c": two, "d": two, "e": flat[:4], "f": flat[4:]}
    reader = CheckpointReader(save(tmp_path, 1, {"model": tensors}, ranks=1))
    for name, tensor in tensors.items():
        assert torch.equal(reader.read("model", name), tensor), name


def test_manifests_travel_as_json(tmp_path: Path) -> None:
    manifest = write_rank_file(tmp_path, 3, [whole_piece("model", "w", torch.zeros(2, 2))])
    assert RankManifest.model_validate_json(manifest.model_dump_json()) == manifest


def piece(offset: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...] = (4, 4)) -> Piece:
    return Piece("model", "w", shape, offset, size, torch.zeros(size))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece((0, 0), (4, 2)), piece((0, 2), (3, 2))], "model/w is incomplete, 14 of 16"),
        ([piece((0, 0), (4, 2)), piece((0, 1), (4, 2))], "stored twice"),
        ([piece((0, 0), (4, 4)), piece((3, 3), (1, 1))], "stored twice"),
        ([piece((0, 2), (4, 3))], "does not fit"),
        ([piece((0, 0), (4, 4)), piece((0, 0), (4, 4), (8, 4))], "one global shape"),
    ],
)
def test_an_index_covers_each_element_once(tmp_path: Path, pieces: list[Piece], message: str) -> None:
    manifests = [write_rank_file(tmp_path, rank, [one]) for rank, one in enumerate(pieces)]
    with pytest.raises(CheckpointError, match=message):
        build_index(1, {}, {}, manifests)


def test_wrong_piece_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model/w: a tensor of shape \(2, 2\)"):
        write_rank_file(tmp_path, 0, [Piece("model", "w", (4, 4), (0, 0), (4, 4), torch.zeros(2, 2))])


def test_another_network_is_refused_by_name(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, 1, {"model": {"a": torch.zeros(2), "b": torch.zeros(3)}}))
    reader.check_shapes("model", {"a": (2,), "b": (3,)})
    with pytest.raises(CheckpointError, match=r"lacks c, also holds b, has a \(2,\) instead of \(4,\)"):
        reader.check_shapes("model", {"a": (4,), "c": (3,)})
    with pytest.raises(CheckpointError, match="model/c"):
        reader.read("model", "c")
    with pytest.raises(CheckpointError, match="does not fit"):
        reader.read_box("model", "a", (1,), (2,))


def test_find_checkpoint(tmp_path: Path) -> None:
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert not has_checkpoint(run)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        find_checkpoint(run)
    for step in (9000, 10000):
        save(root, step, {"model": some_tensors()})
    newest = checkpoint_folder(root, 10000)
    assert has_checkpoint(run)
    assert find_checkpoint(run) == find_checkpoint(root) == find_checkpoint(newest) == newest
    assert find_checkpoint(checkpoint_folder(root, 9000)).name == "step_00009000"
    (root / "latest").unlink()
    assert find_checkpoint(run) == newest
    (root / "latest").write_text("step_00000001\n")
    with pytest.raises(CheckpointError, match=r"step_00000001.*step_00009000, step_00010000"):
        find_checkpoint(run)


def test_the_same_step_again_replaces_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, {"model": some_tensors(1)})
    folder = save(tmp_path, 5, {"model": some_tensors(2)}, ranks=3)
    assert torch.equal(CheckpointReader(folder).read("model", "a.weight"), some_tensors(2)["a.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]

    rename = Path.rename

    def crash_on_second(self: Path, target: Path) -> Path:
        if self.name.startswith(".saving-"):
            raise OSError("power cut")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash_on_second)
    with pytest.raises(CheckpointError, match="power cut"):
        save(tmp_path, 5, {"model": some_tensors(3)})
    monkeypatch.undo()
    survivor = CheckpointReader(find_checkpoint(tmp_path))
    assert torch.equal(survivor.read("model", "a.weight"), some_tensors(2)["a.weight"])

    save(tmp_path, 6, {"model": some_tensors(4)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005", "step_00000006"]
    survivor = CheckpointReader(checkpoint_folder(tmp_path, 5))
    assert torch.equal(survivor.read("model", "a.weight"), some_tensors(2)["a.weight"])


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model": some_tensors()})
    write_rank_file(begin_save(tmp_path, 2), 0, [whole_piece("model", "w", torch.zeros(3))])
    assert find_checkpoint(tmp_path).name == "step_00000001"
    save(tmp_path, 3, {"model": some_tensors()})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000003"]


def test_ranks_without_a_shared_file_system_cannot_publish(tmp_path: Path) -> None:
    temporary = begin_save(tmp_path, 1)
    manifest = write_rank_file(temporary, 0, [whole_piece("model", "w", torch.zeros(3))])
    index = build_index(1, {}, {}, [manifest])
    (temporary / manifest.file).unlink()
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is missing"):
        publish(temporary, checkpoint_folder(tmp_path, 1), index)
    assert not checkpoint_folder(tmp_path, 1).exists()


def test_index_is_the_documented_json(tmp_path: Path) -> None:
    folder = save(tmp_path, 100, {"model": {"w": torch.zeros(2, 3)}}, ranks=1)
    content = json.loads((folder / "index.json").read_text())
    assert folder.name == "step_00000100"
    assert content["format"] == "megadiff-checkpoint" and content["version"] == 1 and content["step"] == 100
    assert content["tensors"]["model/w"] == {
        "shape": [2, 3],
        "dtype": "float32",
        "pieces": [
            {"file": "rank_00000.safetensors", "key": "model/w#0", "offset": [0, 0], "size": [2, 3]},
        ],
    }
    record = content["files"]["rank_00000.safetensors"]
    assert record["bytes"] == (folder / "rank_00000.safetensors").stat().st_size
    assert len(record["sha256"]) == 64


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot save under .*checkpoints"):
        begin_save(tmp_path / "run" / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="cannot write"):
        write_rank_file(tmp_path / "nowhere", 0, [whole_piece("model", "w", torch.zeros(3))])
