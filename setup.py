"""Build script: the metadata lives in pyproject.toml, compiled extensions are listed here.

It must not import torch: pip runs it before torch is there.
"""

from setuptools import setup

setup()
