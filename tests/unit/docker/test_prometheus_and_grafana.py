"""Alert rules by promtool, and the names that rules and dashboard use against those that the server exports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from dsv4.engine.metrics import METRICS

from tests.unit.docker.tools import ROOT, run, tool

RULES = ROOT / "docker" / "prometheus" / "dsv4-alerts.yaml"
DASHBOARD = ROOT / "docker" / "grafana" / "dsv4-triton.json"
PICKER = ROOT / "docker" / "helm" / "dsv4-triton" / "files" / "endpoint-picker.yaml"

PROXY_METRICS = {"dsv4_proxy_http_requests_running"}


def exported_names() -> set[str]:
    """Sample names on the metrics endpoint; a histogram has three."""
    names = set(PROXY_METRICS)
    for metric in METRICS:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + part for part in parts}
    return names


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\bdsv4_[a-z0-9_]+", expression))


def expressions_of_rules() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]  # type: ignore[no-any-return]


def test_promtool_accepts_the_rules() -> None:
    result = run([tool("promtool"), "check", "rules", RULES])
    assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_fire_on_their_fault_and_only_then(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / "dsv4-alerts.yaml")
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path / "test.yaml")
    result = run([tool("promtool"), "test", "rules", "test.yaml"], cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            assert all(rule["annotations"].get(name) for name in ("summary", "description", "remedy"))


def test_rules_and_dashboard_use_exported_names_only() -> None:
    used: set[str] = set()
    for expression in expressions_of_rules():
        used |= metric_names(expression)
    for panel in panels():
        for target in panel["targets"]:
            used |= metric_names(target["expr"])
    assert used <= exported_names()
    specs = yaml.safe_load(PICKER.read_text())["plugins"][1]["parameters"]["engineConfigs"][0]
    picked = {specs["queuedRequestsSpec"], specs["runningRequestsSpec"], specs["kvUsageSpec"]}
    assert picked <= exported_names()


def test_dashboard_expressions_parse(tmp_path: Path) -> None:
    """Each expression becomes a recording rule, with Grafana's variables filled in."""
    rules = []
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*").replace("$pod", ".*")
            rules.append({"record": f"panel:{panel['id']}:{target['refId']}", "expr": filled})
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = run([tool("promtool"), "check", "rules", path])
    assert result.returncode == 0, result.stdout + result.stderr


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
