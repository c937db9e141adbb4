from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from turnstream.errors import MissingExtraError, TurnstreamError
from turnstream.optional import from_extra

REPOSITORY = Path(__file__).parents[2]
RECORDS = {"pyarrow", "grpc", "torch", "redis", "httpx", "hypothesis", "pydantic"}
SERVICES = {
    *("torch", "pyarrow", "grpc", "prometheus_client", "fastapi", "turnstream.worker"),
    *("turnstream.generator", "turnstream_server.bootstrap", "turnstream_server.trainer"),
}


def modules_loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running `code`."""
    probe = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import turnstream", {"numpy", "torch", "pyarrow", "grpc", "redis"}),
        ("import turnstream; turnstream.from_vllm", {"torch", "pyarrow", "grpc", "redis"}),
        ("import turnstream.batching", {"torch", "pyarrow", "grpc", "redis", "httpx", "pydantic"}),
        (
            "import turnstream.generator, turnstream.service",
            {"torch", "pyarrow", "grpc", "httpx2", "pydantic", "turnstream_server"},
        ),
        ("import turnstream.run", {"turnstream.generator", "turnstream.worker"}),
        ("import turnstream_server.cli", {"redis", "numpy", "turnstream_server.trainer"}),
        ("from turnstream_server.cli.options import store_url; store_url('')", SERVICES),
        ("import turnstream_server.console.runs", SERVICES),
        ("import turnstream.worker", {"torch"}),
        ("import turnstream.records.batches", RECORDS - {"pyarrow"}),
        ("from turnstream.records import configs, events, manifests, statuses, turns", RECORDS),
        (
            "import turnstream_server.launch.demo, turnstream_server.launch.replay",
            {"torch", "transformers"},
        ),
    ],
)
def test_an_import_loads_nothing_heavy(code: str, absent: set[str]) -> None:
    assert modules_loaded_by(code) & absent == set()


@pytest.mark.parametrize(
    ("project", "package"),
    [
        ("clients/python/pyproject.toml", "clients/python/src/turnstream"),
        ("pyproject.toml", "services/turnstream_server"),
    ],
)
def test_dependencies_are_exactly_the_packages_that_are_imported(
    project: str, package: str
) -> None:
    # The SDK and the server required httpx, which nothing imports.
    sources = [path.read_text() for path in (REPOSITORY / package).rglob("*.py")]
    own = {Path(package).name, "_typeshed"}

    declared = {_import_name(name) for name in _declared(project)}

    imported = {name for source in sources for name in _imported_by(source)}
    assert imported - own - sys.stdlib_module_names <= declared
    assert [name for name in declared if not any(name in source for source in sources)] == []


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=REPOSITORY, capture_output=True, check=True, text=True
    ).stdout

    targets = ("setup", "demo", "test", "check", "bench", "proto")
    assert all(f"make {target} " in shown for target in targets)


def test_constraints_have_each_declared_package_but_torch() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    projects = ("pyproject.toml", "clients/python/pyproject.toml")
    needed = [Requirement(each) for project in projects for each in _requirements(project)]

    free = {"torch", "turnstream"}
    assert {each.name.lower() for each in needed} - pins.keys() == free
    assert [
        each for each in needed if each.name not in free and pins[each.name] not in each.specifier
    ] == []
    assert [name for name in pins if re.match("torch|triton|nvidia|cuda", name)] == []
    assert all(
        re.fullmatch(r"[\w.]+", version) for version in pins.values()
    )  # neither URL nor build


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("demo", {"-c constraints.txt", "--build-constraint constraints.txt"}),
        ("setup", {"-c constraints.txt", "--build-constraint constraints.txt", "--group dev"}),
        ("setup CONSTRAINTS=", {"--group dev"}),
    ],
)
def test_make_installs_fixed_releases_and_for_the_demo_no_tests(
    target: str, options: set[str]
) -> None:
    command = ["make", "-n", *target.split(), "VENV=absent"]
    environment = {"PATH": os.environ["PATH"]}  # without the options of a make that runs the tests

    shown = subprocess.check_output(command, cwd=REPOSITORY, env=environment, text=True)

    assert {*re.findall(r"-c \w\S+|--build-constraint \S+|--group \S+", shown)} == options
    (torch,) = re.findall(r".*torch==.*", shown)
    assert "--no-deps" in torch
    assert "-c " not in torch


def _requirements(project: str) -> list[str]:
    """Return what a distribution needs, with its extras and its dependency groups."""
    tables = tomllib.loads((REPOSITORY / project).read_text())
    table, groups = tables["project"], tables.get("dependency-groups", {})
    lists = [table["dependencies"], *table["optional-dependencies"].values(), *groups.values()]
    return [each for own in lists for each in own] + tables["build-system"]["requires"]


def _declared(project: str) -> set[str]:
    table = tomllib.loads((REPOSITORY / project).read_text())["project"]
    lists = [table["dependencies"], *table["optional-dependencies"].values()]
    return {re.split(r"[^\w-]", name)[0] for own in lists for name in own}


def _import_name(distribution: str) -> str:
    names = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "protobuf": "google"}
    if distribution.startswith("opentelemetry-"):
        return "opentelemetry"
    return names.get(distribution, distribution).replace("-", "_")


def _imported_by(source: str) -> set[str]:
    """Return the top-level packages that a module imports, at any depth."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return {name.split(".")[0] for name in found}


def run_python(code: str, *, cwd: Path | None = None) -> tuple[list[str], list[str]]:
    """Return the lines that a fresh interpreter prints, and those of its errors."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    return done.stdout.splitlines(), done.stderr.splitlines()


WITHOUT = """
import sys, turnstream
for package, act, _ in {cases}:
    sys.modules[package] = None
    try:
        exec(act)
    except Exception as error:
        print(type(error).__name__, error)
    del sys.modules[package]
"""
ACTS = [
    ("grpc", "import turnstream.worker", "turnstream[worker]"),
    ("pyarrow", "from turnstream.worker import BatchStream", "turnstream[worker]"),
    (
        *("torch", "from turnstream.worker import PulledMiniBatch as P; P.to_torch(None)"),
        "turnstream[torch]",
    ),
    ("httpx2", "turnstream.connect('http://host:7601')", "turnstream[http]"),
    ("tinker", "turnstream.forward_backward_run(object(), run='demo')", "turnstream[tinker]"),
]
"""Packages, code that needs them, and what pip must install."""


def test_missing_package_names_the_command_that_installs_it() -> None:
    said, _ = run_python(WITHOUT.format(cases=ACTS))

    for line, (package, _, wanted) in zip(said, ACTS, strict=True):
        assert line.startswith("MissingExtraError ")
        assert f"needs the package {package}: pip install '{wanted}'" in line


MAIN = """
import sys
from turnstream_server import cli
for package, *words in {cases}:
    sys.modules[package] = None
    sys.argv = ["turnstream", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(ended.code)
"""
TRAINER = ["--run", "a", "--folder", "b", "--policy", "none.json", "--batcher", "c:1"]
OPTIONS = [
    ["tensorboard", "serve", "trainer", *TRAINER, "--tensorboard"],
    ["wandb", "serve", "trainer", *TRAINER, "--wandb", "project"],
    ["matplotlib", "plot", "metrics.jsonl", "--out", "plot.png"],
]
"""Packages, and commands with an option that needs them."""


def test_option_without_its_package_is_one_line_with_the_extra(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')

    codes, said = run_python(MAIN.format(cases=OPTIONS), cwd=tmp_path)

    assert codes == ["1"] * len(OPTIONS)
    for line, (package, *_) in zip(said, OPTIONS, strict=True):
        extra = "plot" if package == "matplotlib" else package
        words = f"needs the package {package}: pip install 'turnstream-server[{extra}]'"
        assert f"{words} (in the repository: pip install '.[{extra}]')" in line
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_error_is_an_import_error_and_survives_pickling() -> None:
    with pytest.raises(ImportError) as caught, from_extra("worker", needed_by="run.batches()"):
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

    assert isinstance(caught.value, TurnstreamError)
    assert isinstance(caught.value, MissingExtraError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.needed_by, again.package, again.extra) == ("run.batches()", "grpc", "worker")


def test_missing_module_of_turnstream_itself_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), from_extra("worker", needed_by="x"):
        raise ModuleNotFoundError("No module named 'turnstream.x'", name="turnstream.x")
