"""Every command, setting, flag, port, probe, image and metric in the manifests exists in the code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.settings import GatewaySettings
from services.runtime.settings import ProcessSettings
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("gateway", "prefill", "decode", "kvtransfer")
DEPLOYMENTS = (*PROCESSES, "nats")
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "kvtransfer": ProcessSettings,
}
NOT_OURS = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"}

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    """The base as kubectl builds it."""
    own = Path(sys.executable).with_name("kubectl")
    kubectl = str(own) if own.exists() else shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: run `make manifests` first")
    done = subprocess.run([kubectl, "kustomize", str(ROOT / "k8s/base")], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in manifests if m["kind"] == kind and re.fullmatch(name, m["metadata"]["name"]))
    return found


def container(manifests: list[Manifest], name: str) -> Manifest:
    (only,) = named(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    return only


def environment(manifests: list[Manifest], name: str) -> dict[str, str]:
    """What the process really sees; a reference to the pod's own fields is given a value of its kind."""
    made: dict[str, str] = {}
    spec = container(manifests, name)
    for source in spec.get("envFrom", []):
        made |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in spec.get("env", []):
        reference = entry.get("valueFrom", {})
        made[entry["name"]] = (
            entry.get("value") or {"fieldRef": "10.1.2.3", "resourceFieldRef": "2"}[next(iter(reference))]
        )
    return made


@pytest.mark.parametrize("role", PROCESSES)
def test_the_command_is_a_process_of_pdserve(manifests: list[Manifest], role: str) -> None:
    assert container(manifests, role)["command"] == ["python", "-m", f"services.{role}"]
    main = (ROOT / "services" / role / "__main__.py").read_text()
    server = ROOT / "services" / role / "server.py"
    assert SETTINGS[role].__name__ in main + (server.read_text() if server.exists() else "")


@pytest.mark.parametrize("role", PROCESSES)
def test_every_variable_is_a_setting_and_has_a_value_it_takes(
    manifests: list[Manifest], role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = SETTINGS[role]
    env = environment(manifests, role)
    known = {f"PDSERVE_{field.upper()}" for field in cls.model_fields}
    shared = {f"PDSERVE_{field.upper()}" for other in PROCESSES for field in SETTINGS[other].model_fields}
    own = {entry["name"] for entry in container(manifests, role).get("env", [])}
    assert own - NOT_OURS <= known
    assert set(env) - NOT_OURS <= shared
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings = cls(_cli_parse_args=False)
    assert settings.host == "0.0.0.0"
    assert settings.advertised_host == "10.1.2.3"
    assert settings.drain_s == 60


@pytest.mark.parametrize("role", PROCESSES)
def test_ports_are_those_the_process_listens_on(manifests: list[Manifest], role: str) -> None:
    env = environment(manifests, role)
    ports = {port["name"]: port["containerPort"] for port in container(manifests, role)["ports"]}
    assert ports.pop("admin") == int(env["PDSERVE_ADMIN_PORT"])
    assert list(ports.values()) == [int(env["PDSERVE_PORT"])]


@pytest.mark.parametrize("role", DEPLOYMENTS)
def test_probes_ask_pages_that_exist_on_ports_that_exist(manifests: list[Manifest], role: str) -> None:
    spec = container(manifests, role)
    pages = (
        {"/healthz"}
        if role == "nats"
        else set(re.findall(r'"(/\w+)"', (ROOT / "services/runtime/admin.py").read_text()))
    )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = spec[probe]["httpGet"]
        assert asked["path"] in pages
        assert asked["port"] in {port["name"] for port in spec["ports"]}


def test_liveness_never_depends_on_others(manifests: list[Manifest]) -> None:
    assert {container(manifests, role)["livenessProbe"]["httpGet"]["path"] for role in PROCESSES} == {"/live"}


def test_what_the_processes_call_are_services_of_that_name_and_port(manifests: list[Manifest]) -> None:
    for role in PROCESSES:
        env = environment(manifests, role)
        addresses = [env["PDSERVE_NATS_URL"].removeprefix("nats://")]
        addresses += [env["PDSERVE_DIRECTORY"]] if "PDSERVE_DIRECTORY" in env else []
        for address in addresses:
            name, port = address.split(":")
            assert int(port) in [entry["port"] for entry in named(manifests, "Service", name)["spec"]["ports"]]


def test_services_lead_to_named_ports_of_pods_they_select(manifests: list[Manifest]) -> None:
    for service in (m for m in manifests if m["kind"] == "Service"):
        deployment = named(manifests, "Deployment", service["metadata"]["name"])
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"] for port in container(manifests, service["metadata"]["name"])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_no_service_name_would_set_a_variable_of_ours(manifests: list[Manifest]) -> None:
    for role in DEPLOYMENTS:
        assert named(manifests, "Deployment", role)["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_each_pool_scales_on_a_metric_of_its_workers(manifests: list[Manifest], pool: str) -> None:
    scaler = named(manifests, "HorizontalPodAutoscaler", pool)["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": pool}
    assert "replicas" not in named(manifests, "Deployment", pool)["spec"]
    (metric,) = scaler["metrics"]
    source = "".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    assert f'"{metric["pods"]["metric"]["name"]}"' in source


def test_the_pools_scale_on_different_metrics(manifests: list[Manifest]) -> None:
    scalers = [
        m["spec"]["metrics"][0]["pods"]["metric"]["name"] for m in manifests if m["kind"] == "HorizontalPodAutoscaler"
    ]
    assert len(scalers) == len(set(scalers)) == 2


@pytest.mark.parametrize("name", ["prefill", "decode", "gateway"])
def test_one_pod_of_a_kind_goes_at_a_time(manifests: list[Manifest], name: str) -> None:
    budget = named(manifests, "PodDisruptionBudget", name)["spec"]
    labels = named(manifests, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("role", PROCESSES)
def test_the_grace_period_outlasts_pre_stop_and_drain(manifests: list[Manifest], role: str) -> None:
    pre_stop_s = container(manifests, role)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = named(manifests, "Deployment", role)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= pre_stop_s + float(environment(manifests, role)["PDSERVE_DRAIN_S"]) + 10


@pytest.mark.parametrize("role", DEPLOYMENTS)
def test_pods_have_no_privilege(manifests: list[Manifest], role: str) -> None:
    pod = named(manifests, "Deployment", role)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["containers"][0]["resources"]["limits"]["memory"]
    assert pod["containers"][0]["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_workers_have_shared_memory(manifests: list[Manifest], pool: str) -> None:
    pod = named(manifests, "Deployment", pool)["spec"]["template"]["spec"]
    (volume,) = (v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory")
    assert {"name": volume, "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("role", PROCESSES)
def test_images_are_targets_of_the_dockerfile_and_pins_agree(manifests: list[Manifest], role: str) -> None:
    image, _, tag = container(manifests, role)["image"].partition(":")
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    assert image.removeprefix("pdserve-") in targets
    assert f'version = "{tag}"' in (ROOT / "pyproject.toml").read_text()


def test_the_flags_of_nats_exist(manifests: list[Manifest]) -> None:
    server = Path(sys.executable).with_name("nats-server")
    usage = subprocess.run([str(server), "--help"], capture_output=True, text=True, check=True)
    for flag in (argument for argument in container(manifests, "nats")["args"] if argument.startswith("-")):
        assert re.search(rf"^\s+{flag}, --", usage.stdout + usage.stderr, flags=re.M), flag


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_what_is_written_while_serving_lies_on_a_volume(manifests: list[Manifest], pool: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    mounts = {mount["mountPath"] for mount in container(manifests, pool)["volumeMounts"]}
    for variable, folder in (("PDSERVE_CACHE", "/kernels"), ("HF_HOME", "")):
        (found,) = re.findall(rf"{variable}=(\S+)", dockerfile)
        assert any(f"{found}{folder}".startswith(mount) for mount in mounts), variable
    assert "/tmp" in mounts
