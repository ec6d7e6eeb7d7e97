"The wheel: what it holds, and that two builds are equal; `make wheel` tries it in an empty environment."

import subprocess
import zipfile

import pytest

from tests.wheel.__main__ import ROOT, build, sha256


@pytest.mark.slow  # two builds
def test_two_builds_have_one_hash_and_every_file_of_the_package(tmp_path):
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    first, second = (build(tmp_path / part) for part in ("first", "second"))
    assert sha256(first) == sha256(second)
    package = ROOT / "stabilitylab"
    files = {f"stabilitylab/{f.relative_to(package).as_posix()}" for f in package.rglob("*") if f.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert wanted - set(zipfile.ZipFile(first).namelist()) == set()
