"""Fetches the 70,000 pictures of Fashion-MNIST (MIT licence, 31 MB) from Debian's package, without installing it.

Needs a Debian or Ubuntu machine with `apt-get` and `dpkg-deb`. Elsewhere, put the four published files into the folder
by hand.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "dataset-fashion-mnist"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "fashion_mnist"
FILES = tuple(f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def main() -> None:
    """Leaves the files in the folder; does nothing if they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"folder for the files (default {FOLDER})")
    folder: Path = parser.parse_args().output
    if not is_complete(folder):
        fetch(folder)
    print(f"{folder} holds {', '.join(FILES)}")


def is_complete(folder: Path) -> bool:
    """Whether all four files are there."""
    return all((folder / name).is_file() for name in FILES)


def fetch(folder: Path) -> None:
    """Unpacks the files of the package into the folder."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is missing; put {', '.join(FILES)} into {folder} by hand")
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as scratch:
        download = subprocess.run(["apt-get", "download", PACKAGE], cwd=scratch, check=False)
        packages = list(Path(scratch).glob(f"{PACKAGE}_*.deb"))
        if download.returncode or not packages:
            sys.exit(f"apt-get could not download {PACKAGE}; its message is above (run `apt-get update` first)")
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), scratch], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (found,) = Path(scratch).rglob(name)
            shutil.copy(found, folder / name)


if __name__ == "__main__":
    main()
