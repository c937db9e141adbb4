"""deploy/observe: Prometheus finds every service, and the board asks for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any, Final

import pytest
import yaml

from testkit.services.compose import REPOSITORY, compose_file

OBSERVE: Final = REPOSITORY / "deploy/observe"
PROMETHEUS: Final = OBSERVE / "prometheus.yml"
GRAFANA: Final = OBSERVE / "grafana"
_ROW: Final = re.compile(r"^\|.*`(turnstream_\w+)`.*$", re.MULTILINE)
_SUFFIXES: Final = ("_bucket", "_sum", "_count")
"""Ends of the names of a histogram."""


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads((GRAFANA / "dashboards/turnstream.json").read_text())


def queries_of(board: dict[str, Any]) -> dict[str, list[str]]:
    """Return the queries of every panel."""
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in board["panels"]
    }


def declared_names() -> set[str]:
    """Return the names of the tables of docs/metrics.md, as Prometheus has them."""
    text = (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8")
    rows = {found[1]: found[0] for found in _ROW.finditer(text)}
    histograms = {name for name, row in rows.items() if "| histogram |" in row}
    return rows.keys() - histograms | {f"{name}{end}" for name in histograms for end in _SUFFIXES}


def test_prometheus_scrapes_every_service_with_the_key() -> None:
    config = yaml.safe_load(PROMETHEUS.read_text())
    services = compose_file()["services"]
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]

    listens = {
        name: each["environment"]["TURNSTREAM_METRICS_LISTEN"]
        for name, each in services.items()
        if "TURNSTREAM_METRICS_LISTEN" in each.get("environment", {}) and name != "operator"
    }
    assert set(found["names"]) == listens.keys()
    assert {*listens.values()} == {f"0.0.0.0:{found['port']}"}
    file = services["batcher"]["environment"]["TURNSTREAM_KEY_FILE"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": file}
    assert "keys:/keys:ro" in services["prometheus"]["volumes"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration() -> None:
    command = ["promtool", "check", "config", "--syntax-only", str(PROMETHEUS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_every_query(board: dict[str, Any], tmp_path: Any) -> None:
    queries = [query for each in queries_of(board).values() for query in each]
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$run", ".*")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))

    done = subprocess.run(
        ["promtool", "check", "rules", file], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_the_board_is_in_the_page_of_metrics(board: dict[str, Any]) -> None:
    declared = declared_names()
    used = {
        title: {name for query in queries for name in re.findall(r"turnstream_\w+", query)}
        for title, queries in queries_of(board).items()
    }

    assert len(declared) > 50
    assert all(used.values())
    assert {title: names - declared for title, names in used.items() if names - declared} == {}


def test_board_shows_what_operators_ask_for(board: dict[str, Any]) -> None:
    shown = " ".join(query for each in queries_of(board).values() for query in each)

    for what in (
        *("reward_mean", "ingested_tokens", "waiting_groups", "wait_reasons", "ready_batches"),
        *("pull_seconds", "padding_share", "merge_ratio", "staleness", "batcher_trajectories"),
        *("store_bytes", "errors_total", "dependency_ready"),
    ):
        assert what in shown


def test_provisioned_files_fit_each_other(board: dict[str, Any]) -> None:
    (source,) = yaml.safe_load((GRAFANA / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "dashboards/boards.yml").read_text())["providers"]
    grafana = compose_file()["services"]["grafana"]

    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert "./deploy/observe/grafana:/etc/grafana/provisioning:ro" in grafana["volumes"]
    folder = provider["options"]["path"]
    assert folder == "/etc/grafana/provisioning/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/turnstream.json"
