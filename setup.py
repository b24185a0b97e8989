"""What pyproject.toml cannot say: `configs/` travels in the package as `glm_grpo/configs/`."""

from __future__ import annotations

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["glm_grpo*", "rewards*"]), "glm_grpo.configs"],
    package_dir={"glm_grpo.configs": "configs"},
)
