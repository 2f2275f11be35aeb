"""Defaults of the environment for every test, set before anything imports torch or DeepSpeed.

Values that the caller has set win. Child processes (launchers, the pool of workers) inherit them.
"""

import atexit
import os
import shutil
import tempfile

if "TORCH_EXTENSIONS_DIR" not in os.environ:
    # Private to this session: a killed build leaves a lock behind, on which the next one would wait forever.
    _extensions_dir = tempfile.mkdtemp(prefix="megadiff-torch-extensions-")
    _owner = os.getpid()

    def _remove_extensions_dir() -> None:
        if os.getpid() == _owner:  # a forked child runs the same exit handlers
            shutil.rmtree(_extensions_dir, ignore_errors=True)

    atexit.register(_remove_extensions_dir)
    os.environ["TORCH_EXTENSIONS_DIR"] = _extensions_dir

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # gloo, also on a machine with a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault("MPLBACKEND", "Agg")
