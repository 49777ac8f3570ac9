"""Building the kernels: what is compiled, where it is kept, and that Python and C++ agree."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from qsync_opt.errors import KernelError, ParameterError
from qsync_opt.kernels import build, native

#: How a parameter of a launcher is passed, by the beginning of its declaration.
LETTERS = (
    ("const int*", "w"),
    ("int64_t", "l"),
    ("uint64_t", "u"),
    ("int ", "i"),
    ("float ", "f"),
)


def declared() -> tuple[dict[str, str], dict[str, str]]:
    """Letters of the parameters of launchers and of other calls, read from the CUDA sources."""
    launchers: dict[str, str] = {}
    calls: dict[str, str] = {}
    for path in build.sources_folder().glob("*.cu"):
        for name, inside in re.findall(r"QSYNC_API int qsync_(\w+)\(([^)]*)\)", path.read_text()):
            parameters = [" ".join(part.split()) for part in inside.split(",")]
            found = calls
            if parameters[-1] == "cudaStream_t stream":
                parameters.pop()
                found = launchers
            found[name] = "".join(letter_of(parameter) for parameter in parameters)
    return launchers, calls


def letter_of(parameter: str) -> str:
    for start, letter in LETTERS:
        if parameter.startswith(start):
            return letter
    assert "*" in parameter, parameter
    return "p"


def test_python_calls_every_launcher_with_the_types_it_declares() -> None:
    assert declared() == (native._SIGNATURES, native._CALLS)


def test_element_types_and_schemes_have_the_numbers_of_the_sources() -> None:
    text = (build.sources_folder() / "common.cuh").read_text()
    names = {
        torch.float32: "kFloat32",
        torch.bfloat16: "kBFloat16",
        torch.float16: "kFloat16",
        torch.int8: "kInt8",
        torch.float8_e4m3fn: "kE4M3",
        torch.float8_e5m2: "kE5M2",
    }
    for dtype, number in native.ELEMENTS.items():
        assert f"{names[dtype]} = {number}" in text


def test_hopper_gets_its_own_instructions() -> None:
    assert build.architecture_of((9, 0)) == "90a"
    assert build.architecture_of((7, 5)) == "75"
    assert build.architecture_of((10, 0)) == "100"


def test_the_place_depends_on_architecture_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "one.cu").write_text("one")
    monkeypatch.setattr(build, "sources_folder", lambda: tmp_path)
    places = {build.library_path("80"), build.library_path("90a")}
    (tmp_path / "one.cu").write_text("other")
    places.add(build.library_path("80"))
    (tmp_path / "two.cuh").write_text("")
    places.add(build.library_path("80"))
    assert len(places) == 4
    assert all(place.is_relative_to(tmp_path / "cache") for place in places)


def test_a_kept_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(KernelError, match="no nvcc"):
        build.build("80")
    target = build.library_path("80")
    target.parent.mkdir(parents=True)
    target.touch()
    assert build.build("80") == target


def test_a_compiler_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'x.cu(3): error: no such thing' >&2\nexit 2\n")
    compiler.chmod(0o755)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    with pytest.raises(KernelError, match=r"x\.cu\(3\): error: no such thing"):
        build.build("80")
    assert not build.library_path("80").exists()


def test_an_architecture_that_is_none_is_refused() -> None:
    with pytest.raises(ParameterError, match="architecture"):
        build.build("80; rm")
    assert build.main(["80; rm"]) == 2


def test_only_hopper_compiles_what_is_for_hopper() -> None:
    every = set(build.sources_folder().glob("*.cu"))
    assert set(build.sources("90a")) == every
    assert {path.name for path in every - set(build.sources("80"))} == {
        "int8_product_sm90.cu",
        "int8_conv_sm90.cu",
    }


def test_sources_are_found_where_a_wheel_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    ((place, patterns),) = re.findall(r'^"(share/.*)" = \[(.*)\]', project, re.MULTILINE)
    assert patterns == '"cuda/*.cu", "cuda/*.cuh", "cuda/*.cpp"'
    site, prefix = tmp_path / "site", tmp_path / "prefix"
    monkeypatch.setattr(build, "__file__", str(site / "qsync_opt" / "kernels" / "build.py"))
    monkeypatch.setattr(sysconfig, "get_path", {"data": str(prefix)}.__getitem__)
    with pytest.raises(KernelError, match="not installed"):
        build.sources_folder()
    user = tmp_path / "user"
    below = user / "lib" / "python3.11" / "site-packages"
    # Of `pip install --target`, of an environment, and of --user or --prefix.
    for package, top in ((site, site), (site, prefix), (below, user)):
        monkeypatch.setattr(build, "__file__", str(package / "qsync_opt" / "kernels" / "build.py"))
        (top / place).mkdir(parents=True)
        (top / place / "one.cu").touch()
        assert build.sources_folder() == top / place
        shutil.rmtree(top)


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "nvcc"
    compiler.touch()  # not to be run either
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(compiler / "cache"))
    with pytest.raises(KernelError, match=f"Not a directory.*{build.CACHE_VARIABLE}"):
        build.build("80")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(KernelError, match="nvcc cannot be run: Permission denied"):
        build.build("80")
