"""The chart is rendered by the real helm for several deployments; the result is checked against Kubernetes' schemas."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
import yaml
from dsv4.cli.main import build_app
from typer.testing import CliRunner

from tests.unit.docker.tools import ROOT, run, tool

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

CHART = ROOT / "docker" / "helm" / "dsv4-triton"
KUBERNETES_VERSIONS = ("1.28", "1.31", "1.36")

EVERYTHING = (
    "scheduling.volcano=true",
    "scheduling.hostArchitecture=huawei-arm",
    "scheduling.priorityClassName=high",
    "prepare.enabled=true",
    "apiKeys.existingSecret=keys",
    "tls.existingSecret=certificate",
    "monitoring.podMonitor=true",
    "monitoring.rules=true",
    "monitoring.dashboard=true",
    "gateway.enabled=true",
)
CPU = ("backend=cpu", "model.path=", "serve=null", "image.tag=cpu")
DEPLOYMENTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "everything with keda": (*EVERYTHING, "autoscaling.kind=keda"),
    "everything with hpa": (*EVERYTHING, "autoscaling.kind=hpa"),
    "local weights": ("weights.source=hostPath", "weights.prePull.enabled=true", "weights.prePull.fromClaim=w"),
    "created keys": ("apiKeys.keys={0123456789abcdef-1,0123456789abcdef-2}",),
    "cpu": CPU,
}  # fmt: skip

# Groups whose schemas are not part of Kubernetes; their objects get structural checks only.
CUSTOM_GROUPS = (
    "monitoring.coreos.com",
    "keda.sh",
    "inference.networking.k8s.io",
    "gateway.networking.k8s.io",
)


@functools.cache
def render(*settings: str) -> list[dict[str, Any]]:
    sets = itertools.chain.from_iterable(("--set", setting) for setting in settings)
    result = run([tool("helm"), "template", "prod", CHART, "--namespace", "llm", *sets])
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def one(documents: list[dict[str, Any]], kind: str, name: str = "prod") -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pod_templates(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [d["spec"]["template"] for d in documents if "template" in d.get("spec", {})] + [
        d for d in documents if d["kind"] == "Pod"
    ]


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def test_helm_lint_finds_nothing() -> None:
    result = run([tool("helm"), "lint", "--strict", CHART])
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("settings", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_objects_obey_the_schemas_of_kubernetes(settings: tuple[str, ...], version: str) -> None:
    documents = render(*settings)
    checked = 0
    for document in documents:
        if document["apiVersion"].split("/")[0] in CUSTOM_GROUPS:
            continue
        kubernetes_validate.validate(document, version, strict=True)
        checked += 1
    assert checked >= 5


def test_the_schemas_catch_a_misspelt_field() -> None:
    deployment = json.loads(json.dumps(one(render(), "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.36", strict=True)


@pytest.mark.parametrize("settings", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_references_between_objects_hold(settings: tuple[str, ...]) -> None:
    documents = render(*settings)
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    assert len(names) == len(documents), "two objects of one kind share a name"
    selector = one(documents, "Deployment")["spec"]["selector"]["matchLabels"]
    for document in documents:
        if document["kind"] == "Service":
            assert document["spec"]["selector"] == selector
    server = one(documents, "Deployment")["spec"]["template"]
    assert selector.items() <= server["metadata"]["labels"].items()
    for template in pod_templates(documents):
        if template is not server:
            assert not selector.items() <= template["metadata"]["labels"].items(), "would receive the service's traffic"
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        for container in containers(template):
            mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
            assert set(mounts) <= volumes
            assert len({mount["mountPath"] for mount in container.get("volumeMounts", [])}) == len(mounts)


@pytest.mark.parametrize("settings", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_every_container_is_confined(settings: tuple[str, ...]) -> None:
    for template in pod_templates(render(*settings)):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]) == {"requests", "limits"}


def test_a_pod_takes_a_whole_machine() -> None:
    deployment = one(render(), "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    server = pod["containers"][0]
    assert server["resources"]["requests"] == server["resources"]["limits"]
    assert server["resources"]["limits"]["huawei.com/Ascend910"] == "8"
    assert "--devices=0,1,2,3,4,5,6,7" in server["args"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    rules = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rules[0]["topologyKey"] == "kubernetes.io/hostname"
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_resource_name_is_a_value() -> None:
    documents = render("npu.resourceName=huawei.com/Ascend910B3", "npu.count=16", "npu.mountDriver=false")
    server = one(documents, "Deployment")["spec"]["template"]["spec"]
    assert server["containers"][0]["resources"]["limits"]["huawei.com/Ascend910B3"] == "16"
    assert not any("hostPath" in volume for volume in server["volumes"])


def test_times_fit_each_other() -> None:
    pod = one(render("lifecycle.drainSeconds=600"), "Deployment")["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] == 15 + 600 + 30
    assert {"--exit-timeout-secs=600", "--drain-seconds=600"} <= set(server["args"])
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "15"]
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 60
    assert startup["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"


def test_json_and_large_numbers_reach_the_command_line_unchanged() -> None:
    arguments = one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert '--speculative-config={"method":"mtp","num_speculative_tokens":3}' in arguments
    assert "--ring-heap=2147483648" in arguments
    assert "--no-enable-prefix-caching" in arguments


@pytest.mark.parametrize("settings", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_the_command_line_knows_every_argument(settings: tuple[str, ...]) -> None:
    arguments = one(render(*settings), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    result = CliRunner().invoke(build_app(), [*own, "--print-environment"])
    assert result.exit_code == 0, result.output


def test_secrets_reach_the_server_by_reference_only() -> None:
    documents = render("apiKeys.keys={0123456789abcdef-1}")
    secret = one(documents, "Secret", "prod-api-keys")
    assert secret["stringData"]["api-keys"] == "0123456789abcdef-1"
    server = one(documents, "Deployment")["spec"]["template"]
    assert "0123456789abcdef-1" not in json.dumps(server)
    (variable,) = [v for v in server["spec"]["containers"][0]["env"] if v["name"] == "DSV4_API_KEYS"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "prod-api-keys", "key": "api-keys"}


def test_custom_objects_have_the_fields_that_matter() -> None:
    documents = render(*DEPLOYMENTS["everything with keda"])
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    pool = one(documents, "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert pool["targetPorts"] == [{"number": 8225}]
    assert pool["endpointPickerRef"]["port"] == {"number": 9002}
    (backend,) = one(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "prod")
    triggers = one(documents, "ScaledObject")["spec"]["triggers"]
    assert [t["metadata"]["query"].count('namespace="llm",pod=~"prod-.*"') for t in triggers] == [1, 1]
    monitor = one(documents, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["scheme"] == "https"
    rules = one(documents, "PrometheusRule")["spec"]["groups"][0]["rules"]
    on_disk = yaml.safe_load((ROOT / "docker" / "prometheus" / "dsv4-alerts.yaml").read_text())
    assert rules == on_disk["groups"][0]["rules"]
    dashboard = one(documents, "ConfigMap", "prod-dashboard")["data"]["dsv4-triton.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "docker" / "grafana" / "dsv4-triton.json").read_text())
    picker = one(documents, "ConfigMap", "prod-endpoint-picker")["data"]["endpoint-picker.yaml"]
    config = yaml.safe_load(picker)
    defined = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    used = {plugin["pluginRef"] for plugin in config["schedulingProfiles"][0]["plugins"]}
    assert used <= defined


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("backend=tpu",), "backend"),
        (("replica=3",), "replica"),
        (("serve.port=80",), "port"),
        (("npu.resourceName=Ascend910",), "resourceName"),
        (("apiKeys.keys={short}",), "keys"),
        (("weights.source=hostPath", "prepare.enabled=true"), "weights.source=pvc"),
        (("model.path=../x",), "path"),
        (("weights.source=hostPath", "weights.prePull.enabled=true"), "fromClaim"),
    ],
)
def test_wrong_values_are_refused_by_name(settings: tuple[str, ...], field: str) -> None:
    sets = itertools.chain.from_iterable(("--set", setting) for setting in settings)
    result = run([tool("helm"), "template", "prod", CHART, *sets])
    assert result.returncode != 0
    assert field in result.stderr


def test_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: object, schema: dict[str, Any], path: str) -> None:
        if isinstance(value, dict) and "properties" in schema:
            for name, item in value.items():
                assert name in schema["properties"], f"{path}{name}"
                compare(item, schema["properties"][name], f"{path}{name}.")

    compare(values, schema, "")
    assert set(schema["properties"]) - {"global"} == set(values)


def test_links_to_the_chart_are_links() -> None:
    assert (ROOT / "docker" / "prometheus" / "dsv4-alerts.yaml").resolve() == CHART / "files" / "alerts.yaml"
    assert (ROOT / "docker" / "grafana" / "dsv4-triton.json").resolve() == CHART / "files" / "dashboard.json"
