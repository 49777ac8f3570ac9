"""Compiles `cuda/`: kernels for a GPU architecture, layers for the torch at hand; keeps both.

On first use, or ahead of time: `python -m qsync_opt.kernels.build [90a ...]`. Kernels include
no torch headers, so nvcc alone builds them in well under a minute on a desktop's cores, and
they fit any torch. Layers are torch operators: a C++ compiler builds them in a quarter of a
minute, once for a release of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from qsync_opt.errors import KernelError, ParameterError

#: No contraction: products and sums round one by one, as in the plain torch reference.
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden")

#: Of the layers, which are torch operators; headers of torch 2.14 ask for C++20.
LAYER_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")

#: Least compute capability with the 8-bit matrix instructions that the products use.
LEAST_CAPABILITY = (7, 5)

#: Names the folder of built libraries; else the user's cache folder is taken.
CACHE_VARIABLE = "QSYNC_OPT_CACHE"

#: Where a wheel puts the sources: `data-files` of pyproject.toml.
_INSTALLED = "share/qsync_opt/cuda"

_LIBRARY = "libqsync_kernels.so"
_LAYERS = "layers.cpp"
_NEWER = "Is the CUDA toolkit new enough for this GPU?"
_log = logging.getLogger(__name__)


def architecture_of(capability: tuple[int, int]) -> str:
    """Name of the architecture to compile for; Hopper's own instructions need the `a`."""
    return "90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"


def sources_folder() -> Path:
    """Where the CUDA sources are.

    In a checkout they are beside the package; an installation keeps them in a folder above the
    package, which `pip install` with --prefix, --user or --target chooses.

    Raises:
        KernelError: they are in neither place.
    """
    above, data = Path(__file__).resolve().parents[2], Path(sysconfig.get_path("data"))
    places = [above / "cuda", *(top / _INSTALLED for top in (above, *above.parents, data))]
    for folder in places:
        if any(folder.glob("*.cu")):
            return folder
    remedy = "Install the package again, or from a checkout (pip install -e .)."
    raise KernelError("library", "the CUDA sources are not installed", remedy)


def sources(architecture: str) -> list[Path]:
    """The files to compile for an architecture: those of `_sm90` hold Hopper's instructions."""
    files = sorted(sources_folder().glob("*.cu"))
    return [path for path in files if architecture == "90a" or not path.stem.endswith("_sm90")]


def cache_folder() -> Path:
    """Where built libraries are kept.

    Raises:
        KernelError: nobody says where, and the user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "qsync_opt"
    except RuntimeError as error:  # a user without a home
        remedy = f"Name a folder that can be written in {CACHE_VARIABLE}."
        raise KernelError("library", f"there is no cache folder: {error}", remedy) from error


def find_compiler() -> Path | None:
    """The nvcc of CUDA_HOME, of the PATH, or of /usr/local/cuda."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = [Path(home) / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc")
    found += [Path(on_path)] if on_path else []
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in found if path.is_file()), None)


def library_path(architecture: str) -> Path:
    """Where the library of the present sources for an architecture is, or will be."""
    digest = hashlib.sha256("\0".join((*FLAGS, architecture)).encode())
    for path in sorted(sources_folder().glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return cache_folder() / f"sm_{architecture}-{digest.hexdigest()[:16]}" / _LIBRARY


def build(architecture: str) -> Path:
    """The library for an architecture, compiled if it is not kept already.

    Processes that ask at the same time wait for the first.

    Args:
        architecture: as nvcc names it after `sm_`, for example `90a`.

    Raises:
        KernelError: there is no compiler, it failed (the message holds its first error), or
            the library cannot be kept.
    """
    if not architecture.isalnum():
        rule = "must be a compute capability such as 80 or 90a"
        raise ParameterError("architecture", rule, architecture)
    target = library_path(architecture)
    if target.is_file():
        return target
    compiler = find_compiler()
    if compiler is None:
        remedy = "Install the CUDA toolkit, or set CUDA_HOME."
        raise KernelError("library", "no nvcc was found", remedy)
    what = f"the CUDA kernels for sm_{architecture}"
    return keep(target, what, functools.partial(_compile, compiler, architecture))


def build_layers() -> Path:
    """The library of layers for the torch at hand, compiled if it is not kept already.

    Raises:
        KernelError: there is no compiler, it failed, or the library cannot be kept.
    """
    source = sources_folder() / _LAYERS
    headers = Path(torch.__file__).parent / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = [*LAYER_FLAGS, abi]
    for place in (headers, headers / "torch" / "csrc" / "api" / "include"):
        flags += ["-isystem", str(place)]
    facts = (torch.__version__, platform.machine(), *flags)
    digest = hashlib.sha256("\0".join(facts).encode() + source.read_bytes()).hexdigest()
    target = cache_folder() / f"host-{digest[:16]}" / "libqsync_layers.so"
    if target.is_file():
        return target
    compiler = find_host_compiler()
    if compiler is None:
        named = os.environ.get("CXX")
        remedy = "Install one (g++ or clang++), or name it in CXX."
        reason = "no C++ compiler was found"
        if named:
            reason, remedy = f"CXX names {named!r}, which cannot be run", "Name another, or none."
        raise KernelError("layers", reason, remedy)
    libraries = [f"-L{headers.parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [*compiler, *flags, str(source), *libraries]
    return keep(target, "the layers for this torch", functools.partial(_compile_layers, command))


def find_host_compiler() -> list[str] | None:
    """The C++ compiler that CXX names, with its options, or the first of the usual ones."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark without its partner
        return None
    for name, *options in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(name)
        if found is not None:
            return [found, *options]
    return None


def keep(target: Path, what: str, compile_to: Callable[[Path], None]) -> Path:
    """Compile a library into the cache folder, unless another process does so first.

    Args:
        target: where it will be; returned.
        what: it is, for the log.
        compile_to: writes it there.

    Raises:
        KernelError: the library cannot be kept.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock"):
            if not target.is_file():
                _log.info("compiling %s ...", what)
                compile_to(target)
                _log.info("built %s", target)
    except OSError as error:
        reason = f"{error.filename or target.parent}: {error.strerror}"
        remedy = f"Name a folder that can be written in {CACHE_VARIABLE}."
        raise KernelError("library", reason, remedy) from error
    return target


#: In words of compilers: what may be otherwise the next time.
_PASSING = ("signal", "memory exhausted", "Cannot allocate memory", "No space left")


def _compile_layers(command: Sequence[str], target: Path) -> None:
    # Every rank of every job would else wait for a compiler that fails, one after the other.
    failed = target.with_name("failed.txt")
    remedy = f"Is the compiler new enough for this torch? CXX names another; then remove {failed}."
    if failed.is_file():
        raise KernelError(_LAYERS, failed.read_text(errors="replace"), remedy)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            run_compiler([*command, "-o", str(made)], _LAYERS, remedy)
        except KernelError as error:
            if not any(word in error.reason for word in _PASSING):
                failed.write_text(error.reason)
            raise
        _put(made, target)


def _put(made: Path, target: Path) -> None:
    """Move a library to its place; a crash leaves all of it there or nothing."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(made, target)


def _compile(compiler: Path, architecture: str, target: Path) -> None:
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def compile_one(source: Path) -> Path:
            output = Path(folder) / f"{source.stem}.o"
            command = [str(compiler), *FLAGS, code, "-c", "-o", str(output), str(source)]
            run_compiler(command, source.name, _NEWER)
            return output

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources(architecture)))
        linked = Path(folder) / _LIBRARY
        command = [str(compiler), "-shared", code, "-o", str(linked), *map(str, objects)]
        run_compiler(command, _LIBRARY, _NEWER)
        _put(linked, target)


def run_compiler(command: Sequence[str], what: str, remedy: str) -> None:
    """Run a compiler.

    Args:
        command: of it.
        what: it compiles, for the error.
        remedy: what to do where it fails.

    Raises:
        KernelError: it cannot be run, or it failed; with its first error.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,  # Ctrl-C is for us: we end it, and do not call it a failure
        )
    except OSError as error:
        reason = f"{command[0]} cannot be run: {error.strerror}"
        raise KernelError(what, reason, "Install the compiler again.") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        end = f"ended by signal {-done.returncode}"
        if done.returncode > 0:
            end = f"ended with code {done.returncode}"
        reason = errors[0] if errors else f"{command[0]} {end}"
        raise KernelError(what, reason, remedy)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _architectures_here() -> list[str]:
    count = torch.cuda.device_count()
    return sorted({architecture_of(torch.cuda.get_device_capability(i)) for i in range(count)})


def main(argv: Sequence[str] | None = None) -> int:
    """Build kernels and layers ahead of time; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m qsync_opt.kernels.build", description=__doc__)
    parser.add_argument("architectures", nargs="*", help="for example 80 90a; default: GPUs here")
    named = parser.parse_args(argv).architectures
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for architecture in named or _architectures_here():
            _log.info("%s", build(architecture))
        _log.info("%s", build_layers())
    except (KernelError, ParameterError) as error:
        _log.info("%s", error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
