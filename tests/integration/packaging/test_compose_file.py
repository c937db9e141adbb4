"""docker-compose.yml and the Dockerfile: valid, and with the safeguards of docs/operations.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import turnstream
from testkit.services.compose import FILE, REPOSITORY, VARIABLE, compose_file, defaults
from turnstream_server.launch.stack import ALLOCATOR_OF_BUFFERS
from turnstream_server.settings import Settings
from turnstream_server.telemetry.tracing import VARIABLES as TRACES

CHECK = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
DOCKERFILE = (REPOSITORY / "deploy/Dockerfile").read_text()
PROFILES = {
    "generator": "demo",
    "model": "tinker",
    "engine": "tinker",
    "sampler": "tinker",
    "operator": "operator",
    "prometheus": "observe",
    "grafana": "observe",
}
ONE_SHOT = {"model", "operator"}
END_WITH_THE_RUN = {"trainer", "generator"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose_file()["services"]


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return the named volumes of a service: path, and whether it may write there."""
    parts = [each.split(":") for each in service.get("volumes", ())]
    return {name: (target, "ro" not in rest) for name, target, *rest in parts if name[0] != "."}


def test_compose_file_follows_the_compose_specification() -> None:
    done = subprocess.run([*CHECK, FILE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_variables_of_the_compose_file_have_the_defaults_of_env() -> None:
    used = dict(VARIABLE.findall(FILE.read_text()))

    assert used == defaults()
    assert used["VERSION"] == turnstream.__version__


def test_env_file_has_nothing_secret() -> None:
    assert [name for name in defaults() if re.search("PASS|SECRET|TOKEN|KEY", name)] == []


def test_services_have_the_profiles_of_the_page(services: dict[str, Any]) -> None:
    found = {name: each["profiles"][0] for name, each in services.items() if "profiles" in each}

    assert found == PROFILES
    assert services.keys() - found.keys() == {"redis", "batcher", "gateway", "trainer"}


def test_every_service_restarts_and_writes_only_its_volumes(services: dict[str, Any]) -> None:
    restarts = {name: each["restart"] for name, each in services.items()}
    assert {name for name, restart in restarts.items() if restart == "no"} == ONE_SHOT
    assert {name for name, each in restarts.items() if each == "on-failure"} == END_WITH_THE_RUN
    assert {*restarts.values()} == {"unless-stopped", "on-failure", "no"}
    for each in services.values():
        assert each["read_only"] is True
        assert each["tmpfs"] == ["/tmp"]
        assert each["security_opt"] == ["no-new-privileges:true"]


def test_ports_are_open_on_the_loopback_only(services: dict[str, Any]) -> None:
    ports = {name: each["ports"] for name, each in services.items() if "ports" in each}

    assert ports.keys() == {"redis", "gateway", "grafana"}  # batchers can be scaled
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)


def test_each_service_sees_its_own_password_of_the_store(services: dict[str, Any]) -> None:
    text = (REPOSITORY / "deploy/redis/users.acl").read_text()
    users = set(re.findall(r"^user (\w+)", text, re.MULTILINE)) - {"default"}

    for name, service in services.items():
        volumes = {each for each in mounts(service) if each.startswith("store-")}
        if name == "redis":
            places = {f"store-{user}": (f"/secrets/{user}", True) for user in users}
            assert {volume: mounts(service)[volume] for volume in volumes} == places
        elif name in users:
            assert volumes == {f"store-{name}"}
            assert mounts(service)[f"store-{name}"] == ("/run/store", False)
            assert service["environment"]["TURNSTREAM_REDIS_URL"] == f"redis://{name}@redis:6379"
        else:
            assert volumes == set()


def test_only_batcher_and_gateway_write_the_api_key(services: dict[str, Any]) -> None:
    found = {
        name: mounts(each)["keys"] for name, each in services.items() if "keys" in mounts(each)
    }

    assert {name for name, (_, writes) in found.items() if writes} == {"batcher", "gateway"}
    assert {path for path, _ in found.values()} == {"/keys"}


def test_every_variable_of_a_service_is_a_setting(services: dict[str, Any]) -> None:
    known = {f"TURNSTREAM_{name.upper()}" for name in Settings.model_fields} | {*TRACES}

    for name, service in services.items():
        if name != "grafana":
            assert service.get("environment", {}).keys() - known == set()


def test_images_run_as_a_user_without_privileges() -> None:
    run = DOCKERFILE.partition("FROM base AS run\n")[2]

    assert re.search(r"^USER turnstream$", run, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "turnstream"]' in run
    assert "HEALTHCHECK" in run
    for target in ("slim", "torch"):
        assert re.search(rf"^FROM run AS {target}$", run, re.MULTILINE)


@pytest.mark.parametrize(("target", "extras"), [("slim", "tracing"), ("torch", "trainer,tracing")])
def test_images_have_the_packages_for_http_and_traces(
    services: dict[str, Any], target: str, extras: str
) -> None:
    build = DOCKERFILE.partition(f"FROM base AS build-{target}\n")[2].partition("\nFROM ")[0]

    assert f'"./clients/python[http]" ".[{extras}]"' in build
    pins = build.index(
        "PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt"
    )
    assert pins < build.index('"./clients/python[http]"')
    assert "$TORCH" not in build[pins:]  # its index has few packages
    targets = {name: each.get("build", {}).get("target") for name, each in services.items()}
    ours = [name for name in targets if targets[name] == target and name != "model"]  # no service
    assert ours
    assert all(TRACES[0] in services[name]["environment"] for name in ours)


def test_build_context_has_what_the_dockerfile_copies() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    kept = (REPOSITORY / ".dockerignore").read_text().splitlines()

    for name in {word for line in copied for word in line.split()}:
        assert f"!{name}" in kept
        assert Path(REPOSITORY, name).exists()


def test_defaults_of_the_image_are_those_of_the_compose_file() -> None:
    found = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))

    assert {name: defaults()[name] for name in found} == found


def test_slim_image_has_the_allocator_of_local_services() -> None:
    _, _, slim = DOCKERFILE.partition("FROM run AS slim\n")
    (variables,) = re.findall(r"^ENV (.+)$", slim.partition("FROM run AS torch")[0], re.MULTILINE)

    assert dict(each.split("=") for each in variables.split()) == ALLOCATOR_OF_BUFFERS
