"""The run folder: resolved settings, class names, and a log that holds the steps of the run once."""

import json
from pathlib import Path

from megadiff.config.load import load_config
from megadiff.engine.run_folder import RunFolder
from tests.engine.runs import tiny_config

LINES = "".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in range(1, 6))


def prepared(path: Path, steps_done: int, names: tuple[str, ...] = ("a", "b")) -> RunFolder:
    folder = RunFolder(path)
    folder.prepare(tiny_config(), names, steps_done)
    return folder


def test_the_settings_load_as_they_were(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "new" / "run", 0)
    assert load_config(folder.path / "config.yaml") == tiny_config()
    assert not folder.log.exists()


def test_class_names_keep_every_character(tmp_path: Path) -> None:
    names = ("smileys & emotion", 'quo"te', "日本")
    prepared(tmp_path, 0, names)
    assert tuple(json.loads((tmp_path / "classes.json").read_text(encoding="utf-8"))) == names


def test_the_log_is_cut_back_to_the_steps_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINES)
    folder = prepared(tmp_path, 3)
    assert folder.log.read_text() == "".join(LINES.splitlines(keepends=True)[:3])


def test_lines_that_a_crash_has_cut_go(tmp_path: Path) -> None:
    broken = ['{"step": 6, "lo', "[]", "{}", '"text"', '{"step": null}', ""]
    for end in broken:
        (tmp_path / "log.jsonl").write_text(LINES + end)
        assert prepared(tmp_path, 5).log.read_text() == LINES


def test_a_complete_log_stays_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINES)
    assert prepared(tmp_path, 5).log.read_text() == LINES


def test_the_figures_are_cut_back_as_the_log_is(tmp_path: Path) -> None:
    (tmp_path / "quality.jsonl").write_text(LINES + '{"step": 3, "fre')
    folder = prepared(tmp_path, 3)
    assert folder.quality.read_text() == "".join(LINES.splitlines(keepends=True)[:3])


def test_a_fresh_run_drops_the_log_of_a_run_without_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(LINES)
    assert prepared(tmp_path, 0).log.read_text() == ""


def test_the_parts_lie_where_others_look_for_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [path.name for path in (folder.log, folder.quality, folder.checkpoints, folder.samples)]
    assert names == ["log.jsonl", "quality.jsonl", "checkpoints", "samples"]
    assert [folder.tensorboard.name, folder.features.name] == ["tensorboard", ".features"]
