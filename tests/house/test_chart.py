"""The Helm chart: rendered by Helm's own engine, and every object checked against the Kubernetes API's schemas. What it
makes fits together and fits the gateway. Runs no cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from preble.cli.epp import PORT
from preble.gateway.core.config import GatewayConfig, variable_of
from preble.gateway.core.config_sources import load
from preble.gateway.core.metric_families import replica_families
from preble.gateway.discovery.kubernetes_objects import OWN, PREFIX
from preble.transport.security import create_keys, load_client_keys, load_server_keys
from tests.support.paths import ROOT

yaml = pytest.importorskip("yaml")
helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk: pip install 'preble[test]'")
validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install 'preble[test]'")

CHART = ROOT / "examples" / "deploy" / "chart"
OLDEST, NEWEST = "1.25", "1.37"  # Kubernetes; the chart's kubeVersion and the latest of which there are schemas
LEAST: dict[str, Any] = {"keys": {"api": ["a-key-of-a-client"]}, "servers": {"model": "m"}}
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": [{"name": "pull"}],
    "keys": {"api": ["a-key-of-a-client", "another-key"], "admin": ["an-admins-key"], "server": "the-servers-key"},
    "gateway": {
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "service": {"annotations": {"c": "d"}},
        "config": {"policy": "round_robin"},
        "peerKeys": "the-peers-keys",
        "picker": {"enabled": True},
    },
    "servers": {
        "model": "m",
        "engine": "sglang",
        "args": ["--tp-size=2"],
        "env": [{"name": "HF_HOME", "value": "/models"}],
        "podAnnotations": {"preble/cost-model": "mistral-7b/a6000"},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "runtimeClassName": "nvidia",
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    },
    "autoscaling": {"enabled": True, "kind": "hpa"},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "serviceAccount": {"annotations": {"e": "f"}},
}
FOREIGN: dict[str, Any] = {
    "keys": {"existingSecret": "mine"},
    "servers": {"enabled": False},
    "discovery": {"service": "vllm", "namespace": "engines", "port": 8000, "deletionCosts": False},
    "serviceAccount": {"name": "theirs"},
    "gateway": {"disruptionBudget": None},
}
CASES = {"least": LEAST, "everything": EVERYTHING, "foreign": FOREIGN}
Objects = dict[tuple[str, str], dict[str, Any]]
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "InferencePool"}  # resources that others define


def rendered(values: dict[str, Any], release: str = "preble") -> Objects:
    """Every object, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        texts = chart.render(values, name=release, namespace="llm")
    objects = [one for text in texts.values() for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(named) == len(objects), "no two are the same"
    return named


@pytest.fixture(scope="module")
def charts() -> dict[str, Objects]:
    """Each case, rendered once."""
    return {name: rendered(values) for name, values in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_one_that_the_api_takes(case: str, charts: dict[str, Objects]) -> None:
    for (kind, name), one in charts[case].items():
        if kind not in CUSTOM:
            for version in (OLDEST, NEWEST):
                validator.validate(one, version, strict=True)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63, name


def test_the_schemas_refuse_what_the_api_would() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"prt": 1}]}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, NEWEST, strict=True)


def pods_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """The pods of each Deployment, and their labels and annotations."""
    return {name: one["spec"]["template"] for (kind, name), one in objects.items() if kind == "Deployment"}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return found


def gateway_config(objects: Objects, tmp_path: Path) -> GatewayConfig:
    """What the gateway of the chart reads, with the Secret's keys as its variables."""
    file = tmp_path / "gateway.yaml"
    file.write_text(objects["ConfigMap", "preble-gateway"]["data"]["gateway.yaml"])
    theirs = {"stringData": {"api-keys": "k" * 8, "server-key": "of-theirs"}}
    secret = objects.get(("Secret", "preble-keys"), theirs)
    environment = {}
    for one in container(pods_of(objects)["preble-gateway"])["env"]:
        key = one.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
        if key in secret["stringData"]:
            environment[one["name"]] = secret["stringData"][key]
        assert key is None or key in secret["stringData"] or one["valueFrom"]["secretKeyRef"]["optional"]
    return load(file, environment, {}).config


def test_the_gateway_reads_its_file_finds_the_servers_and_may_ask_for_them(
    charts: dict[str, Objects], tmp_path: Path
) -> None:
    objects = charts["everything"]
    config = gateway_config(objects, tmp_path)
    assert config.api_keys == ["a-key-of-a-client", "another-key"] and config.admin_keys == ["an-admins-key"]
    assert config.policy == "round_robin" and config.min_workers == 0
    (table,) = config.discovery
    assert table.server.api_key == "the-servers-key" and table.namespace == "llm" and table.deletion_costs
    service = objects["Service", table.service]
    labels = pods_of(objects)["preble-servers"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert dict(part.split("=") for part in (table.selector or "").split(",")).items() <= labels.items()
    rules = objects["Role", "preble-discovery"]["rules"]
    allowed = {(one["resources"][0], verb) for one in rules for verb in one["verbs"]}
    read = {(resource, verb) for resource in ("pods", "endpointslices") for verb in ("list", "watch")}
    assert allowed == read | {("pods", "patch")}
    binding = objects["RoleBinding", "preble-discovery"]
    pod = pods_of(objects)["preble-gateway"]["spec"]
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"] == "preble-gateway"
    assert ("ServiceAccount", "preble-gateway") in objects


def test_gateways_find_each_other_and_have_the_keys_of_a_secret(charts: dict[str, Objects], tmp_path: Path) -> None:
    config = gateway_config(charts["everything"], tmp_path)
    assert config.peers == ["tcp://preble-peers.llm:7070"] and config.peer_bind == "tcp://*:7070"
    service, pod = charts["everything"]["Service", "preble-peers"], pods_of(charts["everything"])["preble-gateway"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {"name": "peers", "containerPort": 7070} in container(pod)["ports"]
    monitored = charts["everything"]["ServiceMonitor", "preble"]["spec"]["selector"]["matchLabels"]
    assert not monitored.items() <= service["metadata"]["labels"].items(), "metrics are asked for once"
    (mount,) = (one for one in container(pod)["volumeMounts"] if one["mountPath"] == config.peer_keys)
    (volume,) = (one["secret"] for one in pod["spec"]["volumes"] if one["name"] == mount["name"])
    assert volume["secretName"] == "the-peers-keys"
    keys = tmp_path / "keys"
    made = {path.name: path for path in create_keys(tmp_path / "made") if path.parent.name == "made"}
    for item in volume["items"]:
        (keys / item["path"]).parent.mkdir(parents=True, exist_ok=True)
        (keys / item["path"]).write_bytes(made[item["key"]].read_bytes())
    assert load_client_keys(keys).public in load_server_keys(keys).allowed
    assert ("Service", "preble-peers") not in charts["least"]


def test_a_pool_has_the_charts_servers_and_its_picker(charts: dict[str, Objects], tmp_path: Path) -> None:
    objects = charts["everything"]
    pool, pods = objects["InferencePool", "preble"]["spec"], pods_of(objects)
    assert pool["selector"]["matchLabels"].items() <= pods["preble-servers"]["metadata"]["labels"].items()
    assert pool["targetPorts"] == [{"number": container(pods["preble-servers"])["ports"][0]["containerPort"]}]
    asked = pool["endpointPickerRef"]
    (port,) = (one for one in objects["Service", asked["name"]]["spec"]["ports"] if one["name"] == "picker")
    (door,) = (one for one in container(pods["preble-gateway"])["ports"] if one["name"] == port["targetPort"])
    picker_port = gateway_config(objects, tmp_path).picker_port
    assert port["port"] == asked["port"]["number"] and door["containerPort"] == picker_port == PORT
    assert asked["failureMode"] == "FailClose"
    gateways, planes = objects["NetworkPolicy", "preble-servers"]["spec"]["ingress"]
    assert "ports" not in gateways and planes == {"ports": [{"port": pool["targetPorts"][0]["number"]}]}
    assert len(charts["least"]["NetworkPolicy", "preble-servers"]["spec"]["ingress"]) == 1
    assert not any(kind == "InferencePool" for kind, _ in charts["least"])


def test_what_servers_publish_is_what_the_gateway_reads_off_their_pods(charts: dict[str, Objects]) -> None:
    for case in ("least", "everything"):
        pod = pods_of(charts[case])["preble-servers"]
        args = container(pod)["args"]
        said = {name.removeprefix(PREFIX): text for name, text in pod["metadata"]["annotations"].items()}
        assert said.keys() <= OWN
        events = json.loads(next(one for one in args if "kv-events-config" in one).partition("=")[2])
        assert events["endpoint"] == f"tcp://*:{said['events-port']}"
        assert events["replay_endpoint"] == f"tcp://*:{said['replay-port']}"
        assert (case == "least") == ("enable_kv_cache_events" in events), "vLLM's alone"
        report = "--enable-prompt-tokens-details" if case == "least" else "--enable-cache-report"
        assert report in args, "the gateway counts hits"
        port = next(int(one.partition("=")[2]) for one in args if one.startswith("--port="))
        (slice_port,) = charts[case]["Service", "preble-servers"]["spec"]["ports"]
        assert container(pod)["ports"] == [{"name": "http", "containerPort": port}] and slice_port["port"] == port


def test_pods_end_after_their_requests(charts: dict[str, Objects], tmp_path: Path) -> None:
    objects = charts["everything"]
    config, pods = gateway_config(objects, tmp_path), pods_of(objects)
    gateway, server = pods["preble-gateway"]["spec"], pods["preble-servers"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] >= config.lame_duck_seconds + config.drain_seconds
    probe = container(pods["preble-gateway"])["readinessProbe"]
    assert probe["httpGet"]["path"] == "/ready", "503 from the SIGTERM on"
    assert probe["periodSeconds"] * probe["failureThreshold"] < config.lame_duck_seconds
    waits = int(container(pods["preble-servers"])["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert config.discovery[0].drain_seconds <= waits < server["terminationGracePeriodSeconds"]


def test_the_gateway_may_do_little(charts: dict[str, Objects]) -> None:
    for objects in charts.values():
        spec = pods_of(objects)["preble-gateway"]["spec"]
        security = spec["containers"][0]["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 10001
        assert security["readOnlyRootFilesystem"] is True and security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        writable = [one["mountPath"] for one in spec["containers"][0]["volumeMounts"] if not one.get("readOnly")]
        assert writable == ["/tmp"]


def test_a_service_called_preble_does_not_set_the_gateways_port(charts: dict[str, Objects]) -> None:
    """Kubernetes sets PREBLE_PORT=tcp://... in pods beside a Service of that name, unless it is told not to."""
    assert variable_of(("port",)) == "PREBLE_PORT" and ("Service", "preble") in charts["least"]
    assert pods_of(charts["least"])["preble-gateway"]["spec"]["enableServiceLinks"] is False


def test_servers_of_others_are_found_where_they_are(charts: dict[str, Objects], tmp_path: Path) -> None:
    objects = charts["foreign"]
    config = gateway_config(objects, tmp_path)
    (table,) = config.discovery
    assert (table.service, table.namespace, table.port, table.selector) == ("vllm", "engines", 8000, None)
    assert objects["Role", "preble-discovery"]["metadata"]["namespace"] == "engines"
    assert [one["verbs"] for one in objects["Role", "preble-discovery"]["rules"]] == [["list", "watch"]] * 2
    kinds = {kind for kind, _ in objects}
    assert not kinds & {"Secret", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    assert set(pods_of(objects)) == {"preble-gateway"}


def test_monitoring_is_what_the_project_has(charts: dict[str, Objects]) -> None:
    objects = charts["everything"]
    dashboard = json.loads(objects["ConfigMap", "preble-dashboard"]["data"]["preble.json"])
    assert dashboard == json.loads((ROOT / "examples/grafana/preble.json").read_text())
    alerts = yaml.safe_load((ROOT / "examples/grafana/alerts.yaml").read_text())
    assert objects["PrometheusRule", "preble"]["spec"] == alerts
    (endpoint,) = objects["ServiceMonitor", "preble"]["spec"]["endpoints"]
    service = objects["Service", "preble"]
    chosen = objects["ServiceMonitor", "preble"]["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= service["metadata"]["labels"].items() and endpoint["path"] == "/metrics"
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_the_autoscaler_asks_for_a_metric_that_there_is(kind: str) -> None:
    objects = rendered({**LEAST, "autoscaling": {"enabled": True, "kind": kind}})
    assert "replicas" not in objects["Deployment", "preble-servers"]["spec"], "they are the autoscaler's"
    scaling = {"desired_workers": 1, "prefill_load": 0.0, "decode_load": 0.0, "observed_seconds": 0.0}
    name = replica_families({**scaling, "worker_loads": {}}, {}, {})[0].name
    if kind == "hpa":
        spec = objects["HorizontalPodAutoscaler", "preble-servers"]["spec"]
        (metric,) = spec["metrics"]
        assert metric["external"]["metric"]["name"] == name
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    else:
        spec = objects["ScaledObject", "preble-servers"]["spec"]
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["query"] == f'max({name}{{namespace="llm",service="preble"}})'
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert spec["scaleTargetRef"]["name"] == "preble-servers"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"servers": {"model": "m"}}, "nobody could ask the gateway"),
        ({"keys": {"insecure": True}}, "servers.model must name the model"),
        ({"keys": {"insecure": True}, "servers": {"enabled": False}}, "there are no servers"),
        ({**LEAST, "serverz": {}}, "serverz"),
        ({"keys": {"api": ["short"]}, "servers": {"model": "m"}}, "keys"),
        ({**LEAST, "autoscaling": {"kind": "none"}}, "autoscaling"),
        ({"keys": {"api": ["a-key-of-a-client"]}, "servers": {"model": "m", "engine": "tgi"}}, "engine"),
    ],
)
def test_values_that_would_not_serve_are_refused_with_the_reason(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        rendered(values)


def test_without_keys_it_serves_by_the_names_of_its_service(tmp_path: Path) -> None:
    config = gateway_config(rendered({"keys": {"insecure": True}, "servers": {"model": "m"}}), tmp_path)
    assert config.insecure and "preble.llm.svc.cluster.local" in config.host_names
