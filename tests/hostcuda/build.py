"""Builds the library in which the CUDA kernels run on the host: `torch.ops.megadiff_hostcuda`.

Objects are named by a hash of everything that they are made from, so a change compiles what it touches and nothing
else. Two processes may build at once: both write to a file of their own and rename it.
"""

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/hostcuda"
Mode = Literal["plain", "address", "thread"]

# The address sanitizer reports with exit status 1 by default, the thread sanitizer only at the end.
SANITIZERS: dict[Mode, list[str]] = {
    "plain": ["-O1"],
    "address": ["-O1", "-g", "-fsanitize=address"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
}


def compiler_flags(mode: Mode) -> list[str]:
    """Flags for sources that include csrc/cuda/primitives.h; they need no torch."""
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/hostcuda'}"]
    return ["-std=c++20", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *SANITIZERS[mode], *include]


def build_hostcuda(mode: Mode = "plain") -> Path:
    """The shared library, built where it is not up to date."""
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    defines = ["-DMEGADIFF_DEVICE=cuda", "-DMEGADIFF_KEY=CPU", "-DMEGADIFF_LIBRARY=megadiff_hostcuda"]
    defines += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-fvisibility=hidden", f"-isystem{torch / 'include'}"]
    flags = [*compiler_flags(mode), *defines]
    csrc = ROOT / "csrc"
    sources = [
        csrc / "library.cpp",
        csrc / "binding.cpp",
        *sorted(csrc.glob("ops/*.cpp")),
        *sorted(csrc.glob("cuda/*.cu")),
    ]
    headers = [*csrc.rglob("*.h"), *(ROOT / "tests/hostcuda").glob("*.h")]
    common = _digest(" ".join(flags).encode(), *(path.read_bytes() for path in sorted(headers)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, flags, common), sources))
    target = FOLDER / f"lib_{mode}_{_digest(*(path.name.encode() for path in objects))}.so"
    link = [
        "g++",
        "-shared",
        *SANITIZERS[mode],
        *map(str, objects),
        f"-L{torch / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-ldl",
    ]
    return _make(target, link)


def build_program(source: Path, mode: Mode, shared: bool = False) -> Path:
    """An executable, or a shared library, of one source that needs no torch."""
    headers = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "tests/hostcuda").glob("*.h")]
    digest = _digest(*(path.read_bytes() for path in [source, *sorted(headers)]))
    target = FOLDER / f"{source.stem}_{mode}_{digest}{'.so' if shared else ''}"
    return _make(target, ["g++", *(["-shared"] if shared else []), *compiler_flags(mode), str(source)])


def sanitized_environment(mode: Mode) -> dict[str, str]:
    """The environment in which a plain Python interpreter can load a sanitized library."""
    if mode == "plain":
        return dict(os.environ)
    library = {"address": "libasan.so", "thread": "libtsan.so"}[mode]
    preload = " ".join(_file_of_gcc(name) for name in (library, "libstdc++.so"))
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    return {**os.environ, **options, "LD_PRELOAD": preload}


def _file_of_gcc(name: str) -> str:
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def _compile(source: Path, flags: list[str], common: str) -> Path:
    target = FOLDER / f"{source.name}_{_digest(common.encode(), source.read_bytes())}.o"
    return _make(target, ["g++", *flags, "-x", "c++", "-c", str(source)])


def _make(target: Path, command: list[str]) -> Path:
    if not target.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.replace(target)
    return target


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
