"""Build script: the metadata lives in pyproject.toml; the kernels of csrc are compiled here, without importing torch.

The CPU library is always built; without a C++ compiler or torch's headers the install works on PyTorch references. The
CUDA library is built when nvcc is found. MEGADIFF_CUDA=1 demands it, =0 leaves it out; MEGADIFF_CUDA_ARCHS="80;90".
"""

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
CXX = shlex.split(os.environ.get("CXX", "c++"))
NVCC = os.environ.get("NVCC", "nvcc")
X86 = platform.machine() in ("x86_64", "AMD64")
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
}
CPU, CUDA = "megadiff._kernels_cpu", "megadiff._kernels_cuda"


def torch_folder() -> Path | None:
    """Where torch is installed, found without importing it."""
    spec = find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def cuda_wanted() -> bool:
    """True where MEGADIFF_CUDA says so, else where nvcc is found."""
    return os.environ.get("MEGADIFF_CUDA", "1" if shutil.which(NVCC) else "0") == "1"


def host_flags(torch: Path, device: str, key: str) -> list[str]:
    """Compiler flags of everything but CUDA kernels. TORCH_TARGET_VERSION: no symbol newer than torch 2.10 is used."""
    defines = [f"-DMEGADIFF_DEVICE={device}", f"-DMEGADIFF_KEY={key}", "-DMEGADIFF_LIBRARY=megadiff"]
    defines += ["-DTORCH_TARGET_VERSION=0x020a000000000000", *(["-DMEGADIFF_X86"] if X86 else [])]
    numeric = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    include = [f"-I{CSRC}", f"-isystem{torch / 'include'}"]
    return ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *numeric, *defines, *include]


def cpu_jobs(torch: Path) -> list[tuple[str, list[str]]]:
    """(object name, command without -o) of every object file of the CPU library."""
    common = [*CXX, *host_flags(torch, "cpu", "CPU"), "-c"]
    plain = [CSRC / "library.cpp", CSRC / "binding.cpp", CSRC / "cpu/dispatch.cpp", *sorted(CSRC.glob("ops/*.cpp"))]
    jobs = [(f"{path.parent.name}_{path.stem}", [*common, str(path)]) for path in plain]
    for path in sorted(set(CSRC.glob("cpu/*.cpp")) - set(plain)):
        for isa in ISA_FLAGS if X86 else ("baseline",):
            flags = [f"-DMEGADIFF_ISA={isa}", *ISA_FLAGS[isa]]
            jobs.append((f"cpu_{path.stem}_{isa}", [*common, *flags, str(path)]))
    return jobs


def cuda_jobs(torch: Path) -> list[tuple[str, list[str]]]:
    """(object name, command without -o) of every object file of the CUDA library."""
    common = [*CXX, *host_flags(torch, "cuda", "CUDA"), "-c"]
    plain = [CSRC / "binding.cpp", *sorted(CSRC.glob("ops/*.cpp"))]
    jobs = [(f"{path.parent.name}_{path.stem}", [*common, str(path)]) for path in plain]
    archs = os.environ.get("MEGADIFF_CUDA_ARCHS", "80;90").split(";")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    nvcc = [NVCC, "-std=c++17", "-O3", *targets, "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{CSRC}", "-c"]
    return jobs + [(f"cuda_{path.stem}", [*nvcc, str(path)]) for path in sorted(CSRC.glob("cuda/*.cu"))]


class BuildKernels(build_ext):
    """Compiles what changed, in parallel, and links one library an extension."""

    def build_extension(self, ext: Extension) -> None:
        torch = torch_folder()
        lacking = f"no compiler `{CXX[0]}`" if not shutil.which(CXX[0]) else "no torch" if torch is None else None
        if torch is None or lacking:
            print(f"megadiff: {lacking} was found: installed without kernels, PyTorch references run instead")
            return
        jobs = cpu_jobs(torch) if ext.name == CPU else cuda_jobs(torch)
        folder = Path(self.build_temp) / ext.name
        folder.mkdir(parents=True, exist_ok=True)
        shared = max(path.stat().st_mtime for path in [ROOT / "setup.py", *CSRC.rglob("*.h")])

        def compile_one(job: tuple[str, list[str]]) -> str:
            target = folder / f"{job[0]}.o"
            if not target.exists() or target.stat().st_mtime < max(shared, Path(job[1][-1]).stat().st_mtime):
                subprocess.run([*job[1], "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            objects = list(pool.map(compile_one, jobs))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [NVCC, "-shared", "-cudart=static"] if ext.name == CUDA else [*CXX, "-shared"]
        subprocess.run(
            [*link, *objects, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-o", str(output)], check=True
        )


names = [CPU, CUDA] if cuda_wanted() else [CPU]
setup(
    ext_modules=[Extension(name, [], py_limited_api=True, optional=True) for name in names],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
