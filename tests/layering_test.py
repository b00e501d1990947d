"""Who may include whom, and what object files may share.

The order of the layers stands in cmake/layers.txt. testkit/ and tests/ may include everything; only tests, benchmarks
and their cases include them. An operator is known to others by its contract, ops/<op>/<op>.h, and by what lies directly
in ops/. The object check needs a build: SHOAL_BUILD_DIR names it.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_SUFFIXES = {".h", ".cpp", ".cuh", ".cu", ".def", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
TEST_FILE = re.compile(r"_(test|tests|bench|cases)(_\w+)?\.(h|cpp|cuh|cu)$")
FREE = {"testkit", "tests"}


def read_layers(root: Path) -> dict[str, int]:
    """Layer to rank."""
    lines = (line.split("#")[0].split() for line in (root / "cmake/layers.txt").read_text().splitlines())
    return {layer: rank for rank, line in enumerate(filter(None, lines)) for layer in line}


def sources(root: Path) -> list[Path]:
    found = []
    for top in ("shoal", "testkit", "tests", "apps"):
        found += [p for p in (root / top).rglob("*") if p.suffix in SOURCE_SUFFIXES and p.is_file()]
    return sorted(found)


def layer_of(path: str) -> str | None:
    """Layer of a path from the root; None for what lies directly in shoal/ (the umbrella header)."""
    parts = path.split("/")
    if parts[0] != "shoal":
        return parts[0]
    return parts[1] if len(parts) > 2 else None


def operator_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[2] if parts[:2] == ["shoal", "ops"] and len(parts) > 3 else None


def problem_of(source: str, bracket: str, target: str, root: Path, layers: dict[str, int]) -> str | None:
    """Why `source` must not include `target`, or None."""
    ours = target.split("/")[0] in {"shoal", "testkit", "tests", "apps"} and "/" in target
    if bracket == "<":
        return "headers of ours are included in quotes" if ours else None
    if not ours:
        return "not a full path from the root"
    if not (root / target).is_file():
        return "no such file"
    here, there = layer_of(source), layer_of(target)
    is_test = here in FREE or TEST_FILE.search(source) is not None
    if target.endswith(".cuh") and not source.endswith((".cu", ".cuh")):
        return "CUDA code in a source that compiles without CUDA"
    if there in FREE:
        return None if is_test else f"{there} is for tests and benchmarks only"
    if here in FREE:
        return None
    if there is None:
        return None if here in (None, "apps") else "the umbrella header is for users"
    for layer in (here, there):
        if layer is not None and layer not in layers:
            return f"{layer} is not in cmake/layers.txt"
    if here is not None and here != there and layers[there] >= layers[here]:
        return f"{here} may not include {there}"
    if here == "apps" == there and source.split("/")[1] != target.split("/")[1]:
        return "apps do not see each other"
    op = operator_of(target)
    if op is not None and op != operator_of(source) and target != f"shoal/ops/{op}/{op}.h":
        return f"only the contract {op}.h is for others"
    return None


def includes(path: Path) -> list[tuple[int, str, str]]:
    """Line number, bracket, target."""
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            found.append((number, match[1], match[2]))
    return found


def violations(root: Path) -> list[str]:
    layers = read_layers(root)
    found = []
    for path in sources(root):
        source = path.relative_to(root).as_posix()
        for number, bracket, target in includes(path):
            problem = problem_of(source, bracket, target, root, layers)
            if problem:
                found.append(f'{source}:{number}: #include "{target}": {problem}')
    return found


def registered_operators(root: Path) -> dict[str, set[str]]:
    """Operators of ops/CMakeLists.txt and the DEPS of each."""
    text = re.sub(r"#.*", "", (root / "shoal/ops/CMakeLists.txt").read_text())
    found = {}
    for name, rest in re.findall(r"shoal_op\(\s*(\w+)([^)]*)\)", text):
        words = rest.split()
        deps = words[words.index("DEPS") + 1 :] if "DEPS" in words else []
        if "EXTRA" in deps:
            deps = deps[: deps.index("EXTRA")]
        found[name] = set(deps)
    return found


def operator_violations(root: Path) -> list[str]:
    registered = registered_operators(root)
    folders = {p.name for p in (root / "shoal/ops").iterdir() if p.is_dir()}
    found = [f"ops/{name} is not in ops/CMakeLists.txt" for name in sorted(folders - set(registered))]
    found += [f"ops/CMakeLists.txt names {name}, which has no folder" for name in sorted(set(registered) - folders)]
    for name in sorted(folders & set(registered)):
        if not (root / f"shoal/ops/{name}/{name}.h").is_file():
            found.append(f"ops/{name} has no contract {name}.h")
        for path in sorted((root / "shoal/ops" / name).rglob("*")):
            if path.suffix not in SOURCE_SUFFIXES:
                continue
            for number, _, target in includes(path):
                other = operator_of(target)
                if other not in (None, name) and other not in registered[name]:
                    source = path.relative_to(root).as_posix()
                    found.append(f"{source}:{number}: {other} is not in the DEPS of {name}")
    return found


def test_includes_follow_the_layers():
    assert sources(ROOT), "no sources found"
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_layers_are_the_folders():
    folders = {p.name for p in (ROOT / "shoal").iterdir() if p.is_dir() and any(p.rglob("*.*"))} | {"apps"}
    layers = set(read_layers(ROOT))
    assert folders <= layers
    assert layers - folders <= {"cuda"}


def test_operators_are_registered():
    found = operator_violations(ROOT)
    assert not found, "\n" + "\n".join(found)


# The rules themselves, on a small tree: each forbidden include must be found, each allowed one must not.
TREE = [
    "shoal/shoal.h",
    "shoal/base/error.h",
    "shoal/tensor/tensor.h",
    "shoal/cpu/pool.h",
    "shoal/cuda/launch.h",
    "shoal/cuda/copy.cuh",
    "shoal/ops/context.h",
    "shoal/ops/rope/rope.h",
    "shoal/ops/rope/rope_tables.h",
    "shoal/ops/norm/norm.h",
    "shoal/model/model.h",
    "shoal/stray/stray.h",
    "testkit/testkit.h",
    "apps/python/bindings.h",
    "apps/bench/bench.h",
]


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("shoal/tensor/a.h", '#include "shoal/base/error.h"', None),
        ("shoal/base/a.h", '#include "shoal/base/error.h"', None),
        ("shoal/base/a.h", "#include <vector>", None),
        ("shoal/base/a.h", '// #include "shoal/model/model.h"', None),
        ("shoal/base/a.h", '  #  include "shoal/tensor/tensor.h"', "base may not include tensor"),
        ("shoal/cpu/a.h", '#include "shoal/cuda/launch.h"', "cpu may not include cuda"),
        ("shoal/cuda/a.h", '#include "shoal/cpu/pool.h"', "cuda may not include cpu"),
        ("shoal/cuda/a.h", '#include "shoal/cuda/copy.cuh"', "compiles without CUDA"),
        ("shoal/cuda/a.cu", '#include "shoal/cuda/copy.cuh"', None),
        ("shoal/ops/norm/a.h", '#include "shoal/ops/rope/rope.h"', None),
        ("shoal/ops/norm/a.h", '#include "shoal/ops/context.h"', None),
        ("shoal/ops/norm/a.h", '#include "shoal/ops/rope/rope_tables.h"', "only the contract rope.h is for others"),
        ("shoal/model/a.h", '#include "shoal/ops/rope/rope_tables.h"', "only the contract"),
        ("shoal/ops/rope/a.h", '#include "shoal/ops/rope/rope_tables.h"', None),
        ("shoal/ops/norm/a.h", '#include "shoal/model/model.h"', "ops may not include model"),
        ("shoal/model/a.h", '#include "model.h"', "not a full path"),
        ("shoal/model/a.h", '#include "shoal/model/absent.h"', "no such file"),
        ("shoal/model/a.h", "#include <shoal/base/error.h>", "in quotes"),
        ("shoal/model/a.h", '#include "shoal/stray/stray.h"', "stray is not in cmake/layers.txt"),
        ("shoal/model/a.h", '#include "shoal/shoal.h"', "the umbrella header is for users"),
        ("shoal/shoal.h", '#include "shoal/model/model.h"', None),
        ("shoal/model/a.cpp", '#include "testkit/testkit.h"', "testkit is for tests and benchmarks only"),
        ("shoal/model/a_test.cpp", '#include "testkit/testkit.h"', None),
        ("shoal/model/a_cases.h", '#include "testkit/testkit.h"', None),
        ("shoal/base/a_test.cpp", '#include "shoal/model/model.h"', "base may not include model"),
        ("tests/a.cpp", '#include "shoal/ops/rope/rope_tables.h"', None),
        ("testkit/a.h", '#include "shoal/model/model.h"', None),
        ("apps/python/a.cpp", '#include "apps/python/bindings.h"', None),
        ("apps/python/a.cpp", '#include "apps/bench/bench.h"', "apps do not see each other"),
        ("apps/python/a.cpp", '#include "shoal/shoal.h"', None),
    ],
)
def test_rules(tmp_path: Path, source: str, line: str, problem: str | None):
    (tmp_path / "cmake").mkdir()
    shutil.copy(ROOT / "cmake/layers.txt", tmp_path / "cmake")
    for name in {*TREE, source}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / source).write_text(f"#pragma once\n{line}\n")
    found = violations(tmp_path)
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{source}:2: ")
        assert problem in found[0]


def test_operator_rules(tmp_path: Path):
    ops = tmp_path / "shoal/ops"
    for name in ("one", "two", "unlisted"):
        (ops / name).mkdir(parents=True)
        (ops / name / f"{name}.h").touch()
    (ops / "two/two.cpp").write_text('#include "shoal/ops/one/one.h"\n')
    listed = ops / "CMakeLists.txt"
    listed.write_text("# shoal_op(commented)\nshoal_op(one)\nshoal_op(two EXTRA a.cpp)\nshoal_op(gone DEPS one)\n")
    assert operator_violations(tmp_path) == [
        "ops/unlisted is not in ops/CMakeLists.txt",
        "ops/CMakeLists.txt names gone, which has no folder",
        "shoal/ops/two/two.cpp:1: one is not in the DEPS of two",
    ]
    listed.write_text("shoal_op(one)\nshoal_op(two EXTRA a.cpp\n  DEPS one)\nshoal_op(unlisted)\n")
    assert operator_violations(tmp_path) == []
    (ops / "one/one.h").unlink()
    assert operator_violations(tmp_path) == ["ops/one has no contract one.h"]


def shared_symbols(object_file: Path, isa: str) -> list[str]:
    """Weak symbols whose name has no part in namespace cpu_<isa>: the linker keeps one copy of such a symbol, maybe the
    one that was compiled for a larger instruction set than the machine has."""
    nm = subprocess.run(
        ["nm", "--defined-only", "--format=posix", object_file], capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in nm.stdout.splitlines())
    names = [row[0] for row in rows if len(row) > 1 and row[1] in "WwVvu" and f"cpu_{isa}" not in row[0]]
    if not names:
        return []
    return subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()


def needs_tools(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")


def test_kernels_share_no_weak_symbols():
    needs_tools("nm", "c++filt")
    build = os.environ.get("SHOAL_BUILD_DIR")
    if not build:
        pytest.skip("SHOAL_BUILD_DIR is not set")
    if "CMAKE_BUILD_TYPE:STRING=Release" not in (Path(build) / "CMakeCache.txt").read_text().splitlines():
        pytest.skip("only a release build inlines what must be inline")
    found = []
    num_objects = 0
    for isa in ("avx2", "avx512"):
        for path in sorted(Path(build).glob(f"**/*_{isa}.dir/**/*.o")):
            num_objects += 1
            found += [f"{path.relative_to(build)}: {name}" for name in shared_symbols(path, isa)]
    if num_objects == 0 and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this processor's build has no kernels for an instruction set")
    assert num_objects > 0, "no object of a kernel was found: where has the build put them?"
    assert not found, "\n" + "\n".join(found)


def test_weak_symbols_are_found(tmp_path: Path):
    needs_tools("nm", "c++filt", "c++")
    (tmp_path / "a.cpp").write_text(
        "template <class T> T shared(T x) { return x + 1; }\n"
        "namespace cpu_avx2 { struct Own {}; template <class T> T own(T x) { return x + 2; }\n"
        "template float own<float>(float); }\n"
        "template <class T> int tagged(T) { return 3; }\n"
        "template int tagged(cpu_avx2::Own);\n"
        "template int shared<int>(int);\n"
    )
    subprocess.run(["c++", "-c", "a.cpp", "-o", "a.o"], cwd=tmp_path, check=True)
    assert shared_symbols(tmp_path / "a.o", "avx2") == ["int shared<int>(int)"]
