"""`megadiff convert` and launch/convert.py: arguments, one-line errors and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.cli_convert import main, parse_size
from megadiff.config.load import load_config, to_yaml
from megadiff.errors import ConfigError
from tests.checkpoint.networks import random_run, tiny_config

ROOT = Path(__file__).parent.parent


CONFIGS = {
    "dit": tiny_config(time_freq_shift=1),
    "unet": load_config(None, {"model.preset": "unet-tiny-test", "data.name": "ids"}),
    "text unet": load_config(None, {"model.preset": "unet-text-tiny-test", "data.name": "ids"}),
}


@pytest.mark.parametrize("network", CONFIGS)
def test_out_and_back(network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS[network]
    run, out, new = (str(tmp_path / name) for name in ("run", "out", "new"))
    random_run(Path(run), config)
    options = ["--weights", "raw", "--dtype", "bfloat16", "--max-shard-size", "40KB"]
    assert main([run, out, "--to", "diffusers", *options]) == 0
    assert len(list(Path(out).glob("*.safetensors"))) > 1
    file = sorted(Path(out).glob("*.safetensors"))[0]
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["weights"] == "raw"
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}  # noqa: SIM118
    yaml = tmp_path / "config.yaml"
    yaml.write_text(to_yaml(config))
    assert main([out, new, "--from", "diffusers", "--config", str(yaml)]) == 0
    assert CheckpointReader(find_checkpoint(Path(new))).config() == config
    assert capsys.readouterr().out == f"wrote {out}\nwrote {new}\n"


def test_errors_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Also that the launch script runs by itself."""
    command = [
        sys.executable,
        "launch/convert.py",
        str(tmp_path / "none"),
        str(tmp_path / "out"),
        "--to",
        "native",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("megadiff: error: there is no checkpoint at") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "native", "--num-heads", "4"], "--num-heads belongs to --from"),
        (["--from", "native", "--weights", "raw"], "--weights belongs to --to"),
        (["--from", "native", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--to", "native", "--max-shard-size", "big"], "--max-shard-size = big"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_direction_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert stop.value.code == 2


def test_sizes() -> None:
    assert [parse_size(text) for text in ("1000", "5GB", "500MiB", "2 kb")] == [
        1000,
        5 * 10**9,
        500 * 2**20,
        2000,
    ]
    for text in ("", "0", "-1GB", "1.5GB", "GB", "5TB", "5GM"):
        with pytest.raises(ConfigError, match="--max-shard-size"):
            parse_size(text)
