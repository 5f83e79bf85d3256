"""The manifests start pods that hold what raypd's placement asks for, and ports that only clients find open.

Tests of cluster/manifests/job.py, cluster/manifests/objects.py, cluster/manifests/pod_groups.py,
cluster/manifests/pods.py, cluster/manifests/ray_cluster.py, cluster/manifests/redis.py,
cluster/manifests/services.py, cluster/settings/kubernetes.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.commands.doctor.findings import Verdict
from cluster.commands.doctor.node import judge_shm
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.manifests.objects import to_yaml
from cluster.manifests.pod_groups import settle
from cluster.manifests.render import image_of, render
from cluster.pool.engines.engine_placement import can_hold, engine_bundle
from cluster.pool.ray_objects.ray_nodes import Node
from cluster.routing.engine_connection import EngineRole
from cluster.settings.kubernetes import RAY_VERSION, VERSION
from tests.cluster.manifests.deployments import OVERLAYS, everything, of_kind, rendered, settings, worker_groups

_ROOT = Path(__file__).parents[3]


def _node(group: Any) -> Node:
    """A pod of the group, as Ray knows it once KubeRay has started it."""
    resources = {name: float(amount) for name, amount in group["resources"].items()}
    return Node(group["groupName"], "10.0.0.1", "host", resources, group["labels"])


def _served(overlay: str) -> ClusterConfig:
    """Return the configuration that `raypd serve` reads in the cluster."""
    return _serve_config(rendered(overlay))


def _serve_config(objects: Sequence[Any]) -> ClusterConfig:
    text = of_kind(objects, "ConfigMap", "raypd-config")["data"]["cluster.yaml"]
    return ClusterConfig.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_pod_holds_one_engine_of_its_role_and_nothing_else(overlay: str) -> None:
    config, groups = _served(overlay), worker_groups(rendered(overlay))
    for role in EngineRole:
        if not config.group(role).count:
            continue
        fitting = [name for name, group in groups.items() if can_hold(_node(group), config, role)]
        offered = _node(groups[role.value]).resources
        assert fitting == [role.value]
        assert all(offered[name] < 2 * amount for name, amount in engine_bundle(config, role).items())
        assert groups[role.value]["replicas"] == config.group(role).count


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_ingress_pod_holds_one_ingress(overlay: str) -> None:
    config, groups = _served(overlay), worker_groups(rendered(overlay))

    assert config.ingress.resources == {"raypd_ingress": 1.0}
    assert [name for name, group in groups.items() if "raypd_ingress" in group["resources"]] == ["ingress"]
    assert groups["ingress"]["resources"]["raypd_ingress"] == "1"
    assert groups["ingress"]["replicas"] == config.ingress.count
    assert (config.ingress.host, config.ingress.port) == ("0.0.0.0", 50051)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_of_raypd_is_on_the_head_that_it_is_to_outlive(overlay: str) -> None:
    head = of_kind(rendered(overlay), "RayCluster")["spec"]["headGroupSpec"]

    assert (head["labels"], head["resources"]) == ({"raypd.io/role": "head"}, {"CPU": "0"})
    assert _served(overlay).controller.labels == {"raypd.io/role": "!head"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_served_is_what_the_settings_say(overlay: str) -> None:
    served = _served(overlay)
    ours = settle(settings(overlay)).model_copy(update={"kubernetes": served.kubernetes})

    assert served == ours


def _pods(objects: Any) -> list[Any]:
    pods = []
    for one in objects:
        spec = one.get("spec", {})
        if "submitterPodTemplate" in spec:
            pods.append(spec["submitterPodTemplate"]["spec"])
        spec = spec.get("rayClusterSpec", spec)
        if "template" in spec:
            pods.append(spec["template"]["spec"])
        groups = [spec[name] for name in ("headGroupSpec",) if name in spec] + spec.get("workerGroupSpecs", [])
        pods += [group["template"]["spec"] for group in groups]
    return pods


def _memory(config: dict[str, Any], group: str) -> tuple[str, str]:
    """The memory of that group's pods, and the part of it that /dev/shm may take."""
    pod = worker_groups(render(ClusterConfig.model_validate(config)))[group]["template"]["spec"]
    [shm] = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["medium"] == "Memory"
    [container] = pod["containers"]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    return container["resources"]["limits"]["memory"], shm["sizeLimit"]


def test_a_cpu_pods_memory_holds_the_kv_cache_of_every_rank_and_the_store_behind_it() -> None:
    """2 GiB for Ray and for each rank's process, 4 GiB for each rank's weights, 0.5 GiB of /dev/shm, and the KV."""
    ranks = {"parallel": {"tensor_parallel_size": 2}}

    assert _memory({}, "decode") == ("12800Mi", "512Mi")
    assert _memory({"cache": {"kv_cache_memory_gib": 30}}, "decode") == ("39424Mi", "512Mi")
    assert _memory({"cache": {"kv_cache_memory_gib": 30}, **ranks}, "decode") == ("76288Mi", "512Mi")
    store = {"kv_transfer": {"cpu_cache_gib": 10}}
    assert _memory({"cache": {"kv_cache_memory_gib": 30}, **store}, "decode") == ("49664Mi", "512Mi")
    assert _memory({"decode": {"count": 1, "cache": {"kv_cache_memory_gib": 30}}}, "prefill") == ("12800Mi", "512Mi")


def test_a_gpu_pods_shared_memory_grows_with_its_ranks() -> None:
    """NCCL's ranks of one pod talk through it: 2 GiB each, beside Ray's 0.5."""
    gpus = {"decode": {"count": 1, "num_gpus": 1}}

    assert _memory(gpus, "decode") == ("104960Mi", "2560Mi")
    assert _memory({**gpus, "parallel": {"tensor_parallel_size": 8}}, "decode") == ("821760Mi", "16896Mi")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_doctor_finds_enough_shared_memory_in_every_pod(overlay: str) -> None:
    """Ray runs already: it has touched a few pages."""
    cluster = of_kind(rendered(overlay), "RayCluster")["spec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        [shm] = [one["emptyDir"] for one in group["template"]["spec"]["volumes"] if one["name"] == "shm"]
        size_bytes = int(shm["sizeLimit"].removesuffix("Mi")) * 2**20
        num_gpus = int(group["resources"].get("GPU", 0))
        assert judge_shm(size_bytes, size_bytes - 2**20, num_gpus).verdict is Verdict.OK


def test_engines_do_not_yield_to_what_else_runs_in_their_pods() -> None:
    for group in worker_groups(rendered("cpu-demo")).values():
        [container] = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


def test_only_ingresses_have_a_grpc_readiness_probe_and_nobody_a_liveness_probe() -> None:
    for overlay in OVERLAYS:
        groups = worker_groups(rendered(overlay))
        probes = {
            name: group["template"]["spec"]["containers"][0].get("readinessProbe") for name, group in groups.items()
        }
        assert [name for name, probe in probes.items() if probe] == ["ingress"]
        kind = "grpc" if settings(overlay).kubernetes.tls is None else "tcpSocket"
        assert probes["ingress"][kind] == {"port": 50051}
    assert not any("livenessProbe" in container for pod in _pods(everything()) for container in pod["containers"])


def test_every_pod_meets_the_restricted_standard_but_for_rdma() -> None:
    """kubernetes.io/docs/concepts/security/pod-security-standards, as of 1.33."""
    pods = _pods(everything())
    assert len(pods) > 20
    for pod in pods:
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert all(
            set(volume) & {"emptyDir", "configMap", "persistentVolumeClaim", "secret"}
            for volume in pod.get("volumes", [])
        )
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            has_rdma = any(name.startswith("rdma/") for name in container["resources"]["limits"])
            assert container["securityContext"]["capabilities"].get("add", []) == (["IPC_LOCK"] if has_rdma else [])
    levels = {
        overlay: of_kind(rendered(overlay), "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for overlay in OVERLAYS
    }
    assert levels == {
        "cpu-demo": "restricted",
        "gateway-inference": "restricted",
        "gpu-1p1d": "restricted",
        "gpu-xpyd-tp": "restricted",
        "rdma": "privileged",
    }


def test_only_the_heads_autoscaler_has_a_service_account() -> None:
    for overlay in OVERLAYS:
        cluster = of_kind(rendered(overlay), "RayCluster")["spec"]
        mounted = [
            group["template"]["spec"]["automountServiceAccountToken"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        ]
        assert mounted == [bool(cluster.get("enableInTreeAutoscaling"))] + [False] * len(cluster["workerGroupSpecs"])


def test_all_of_raypds_containers_have_the_one_image() -> None:
    for overlay in OVERLAYS:
        images = {container["image"] for pod in _pods(rendered(overlay)) for container in pod["containers"]}
        assert images - {"redis:7.4.7-alpine"} == {image_of(settings(overlay))}


def test_clients_reach_ingresses_only_and_ray_is_reached_from_inside() -> None:
    policies = [one for one in rendered("gpu-xpyd-tp") if one["kind"] == "NetworkPolicy"]
    open_to_all: list[Any] = []
    for policy in policies:
        spec: Any = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        open_to_all += [(spec["podSelector"], rule["ports"]) for rule in spec["ingress"] if "from" not in rule]
    ingresses = {"matchLabels": {"ray.io/cluster": "raypd", "ray.io/group": "ingress"}}

    assert open_to_all == [(ingresses, [{"protocol": "TCP", "port": 50051}, {"protocol": "TCP", "port": 8000}])]
    assert of_kind(policies, "NetworkPolicy", "raypd-submit")["spec"]["ingress"][0]["from"] == [
        {"podSelector": {"matchLabels": {"raypd.io/submitter": "true"}}}
    ]
    job = of_kind(rendered("gpu-xpyd-tp"), "Job")["spec"]["template"]
    assert job["metadata"]["labels"]["raypd.io/submitter"] == "true"


def test_services_select_ingresses_with_http2_and_one_names_each_of_them() -> None:
    grpc = of_kind(rendered("cpu-demo"), "Service", "raypd-grpc")["spec"]
    headless = of_kind(rendered("cpu-demo"), "Service", "raypd-grpc-headless")["spec"]

    for spec in (grpc, headless):
        assert spec["selector"] == {"ray.io/cluster": "raypd", "ray.io/group": "ingress"}
        assert spec["ports"] == [
            {"name": "grpc", "port": 50051, "targetPort": 50051, "appProtocol": "kubernetes.io/h2c"}
        ]
    assert (grpc["type"], headless["clusterIP"]) == ("ClusterIP", "None")
    http = of_kind(rendered("cpu-demo"), "Service", "raypd-http")["spec"]
    assert http["ports"] == [{"name": "http", "port": 8000, "targetPort": 8000, "appProtocol": "http"}]


def test_every_ingress_pod_gets_its_ingress_however_many_there_come_to_be() -> None:
    assert all(_served(overlay).ingress.per_node for overlay in OVERLAYS)


@pytest.mark.parametrize(
    "settings", [{"admin_port": 50061, "count": 2}, {"port": 49961, "count": 2}], ids=["told", "by-default"]
)
def test_operators_have_a_port_of_their_own_that_clients_do_not_reach(settings: dict[str, int]) -> None:
    objects = render(ClusterConfig.model_validate({"ingress": settings}))
    [ingress] = worker_groups(objects)["ingress"]["template"]["spec"]["containers"]
    address = "raypd-admin.raypd.svc:50061"

    assert {"name": "admin", "containerPort": 50061} in ingress["ports"]
    service = of_kind(objects, "Service", "raypd-admin")["spec"]
    assert service["type"] == "ClusterIP"
    assert service["selector"] == {"ray.io/cluster": "raypd", "ray.io/group": "ingress"}
    assert [(port["port"], port["appProtocol"]) for port in service["ports"]] == [(50061, "kubernetes.io/h2c")]
    assert of_kind(objects, "NetworkPolicy", "raypd-admin")["spec"]["ingress"] == [
        {
            "from": [{"podSelector": {"matchLabels": {"raypd.io/submitter": "true"}}}],
            "ports": [{"protocol": "TCP", "port": 50061}],
        }
    ]
    open_to_all = of_kind(objects, "NetworkPolicy", "raypd-clients")["spec"]["ingress"][0]["ports"]
    assert 50061 not in [port["port"] for port in open_to_all]
    for group in worker_groups(objects).values():
        hook = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[-1].endswith(f"--address {address}")
    assert (
        f"raypd status --address {address}"
        in (of_kind(objects, "Job")["spec"]["template"]["spec"]["containers"][0]["command"][-1])
    )


def test_operators_call_where_clients_do_only_if_that_is_what_was_asked_for() -> None:
    objects = render(ClusterConfig.model_validate({"ingress": {"admin_port": None}}))
    assert "raypd-admin" not in to_yaml(objects)
    assert _serve_config(objects).ingress.admin_port is None


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_an_administrator_by_where_it_is(overlay: str) -> None:
    ingress = _serve_config(rendered(overlay)).ingress
    assert ingress.admin_port not in {None, ingress.port}


def test_engines_that_encode_have_pods_with_settings_of_their_own() -> None:
    config = ClusterConfig.model_validate(
        {"encode": {"count": 2}, "kubernetes": {"encode": {"max_pods": 4}, "both": {"max_pods": 9}}}
    )
    group = worker_groups(render(config))["encode"]

    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 4)
    assert group["labels"] == {"raypd.io/role": "encode"}


def test_without_an_http_api_nothing_speaks_of_one() -> None:
    config = ClusterConfig.model_validate({"ingress": {"http": None}, "kubernetes": {"monitoring": {}}})
    objects = render(config)

    assert [one["metadata"]["name"] for one in objects if one["kind"] == "Service"] == [  # type: ignore[index, call-overload]
        "raypd-grpc",
        "raypd-admin",
        "raypd-grpc-headless",
        "raypd-metrics",
    ]
    assert "8000" not in yaml.safe_dump(objects)


def test_prometheus_is_told_where_raypds_own_metrics_are_and_how_to_ask() -> None:
    spec = of_kind(rendered("gpu-xpyd-tp"), "PodMonitor", "raypd-ingress")["spec"]
    [endpoint] = spec["podMetricsEndpoints"]
    ports = worker_groups(rendered("gpu-xpyd-tp"))["ingress"]["template"]["spec"]["containers"][0]["ports"]

    assert (endpoint["port"], endpoint["path"], endpoint["scheme"]) == ("http", "/metrics", "https")
    assert endpoint["authorization"] == {"credentials": {"name": "raypd-tokens", "key": "operator"}}
    assert {"name": "http", "containerPort": 8000} in ports


def test_the_autoscaler_may_go_as_far_as_the_settings_say() -> None:
    spec = of_kind(rendered("gpu-xpyd-tp"), "RayCluster")["spec"]
    bounds = {
        name: (group["minReplicas"], group["maxReplicas"])
        for name, group in worker_groups(rendered("gpu-xpyd-tp")).items()
    }

    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["version"]) == (True, "v2")
    assert bounds == {"ingress": (3, 3), "prefill": (4, 8), "decode": (8, 16)}


def test_the_head_keeps_its_state_in_redis_by_a_password_that_no_manifest_holds() -> None:
    objects = rendered("gpu-1p1d")
    options = of_kind(objects, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    reference = {"name": "raypd-redis", "key": "password"}

    assert options["redisAddress"] == "raypd-redis.raypd.svc:6379"
    assert options["redisPassword"] == {"valueFrom": {"secretKeyRef": reference}}
    [container] = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": reference}}]
    assert not [one for one in objects if one["kind"] == "Secret"]


def test_another_redis_can_be_used() -> None:
    config = ClusterConfig.model_validate(
        {"kubernetes": {"redis": {"address": "redis.example:6380", "secret": "mine"}}}
    )
    objects = render(config)

    assert of_kind(objects, "RayCluster")["spec"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis.example:6380"
    assert not [one for one in objects if one["kind"] == "StatefulSet"]


def _secret_files(pod: Any) -> dict[str, Any]:
    """Return the keys of the Secrets that a pod has, by the Secret's name; "all" if it has them all."""
    secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    return {one["secretName"]: [item["key"] for item in one.get("items", [])] or "all" for one in secrets}


def test_only_ingresses_have_the_private_key_and_the_tokens() -> None:
    objects = rendered("gpu-xpyd-tp")
    groups = worker_groups(objects)
    everybody = {"raypd-tls": ["ca.crt"], "raypd-tokens": ["operator"]}
    inside = {
        "raypd-internal-tls": ["ca.crt", "tls.crt", "tls.key"],
        "raypd-cluster-secret": ["secret"],
        "raypd-block-hash-key": ["key"],
    }

    assert _secret_files(groups["ingress"]["template"]["spec"]) == inside | {
        "raypd-tls": "all",
        "raypd-tokens": ["tokens.yaml", "operator"],
    }
    assert _secret_files(groups["decode"]["template"]["spec"]) == inside | everybody
    assert _secret_files(of_kind(objects, "Job")["spec"]["template"]["spec"]) == everybody
    assert _secret_files(of_kind(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]) == inside
    ingress = _served("gpu-xpyd-tp").ingress
    assert ingress.tls is not None
    assert (str(ingress.tls.certificate), str(ingress.tokens), ingress.insecure) == (
        "/etc/raypd-tls/tls.crt",
        "/etc/raypd-tokens/tokens.yaml",
        False,
    )
    assert of_kind(objects, "Service", "raypd-grpc")["spec"]["ports"][0]["appProtocol"] == "https"


def test_the_pods_own_commands_find_their_credentials() -> None:
    [container] = worker_groups(rendered("gpu-xpyd-tp"))["decode"]["template"]["spec"]["containers"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    variables = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("RAYPD_T")}

    assert variables == {"RAYPD_TLS_CA": "/etc/raypd-tls/ca.crt", "RAYPD_TOKEN_FILE": "/etc/raypd-tokens/operator"}
    assert all(str(Path(path).parent) in mounted for path in variables.values())


def test_with_mutual_tls_the_pods_show_a_certificate() -> None:
    config = ClusterConfig.model_validate({"kubernetes": {"tls": {"mutual": True}, "tokens": {}}})
    decode = worker_groups(render(config))["decode"]["template"]["spec"]
    variables = {one["name"] for one in decode["containers"][0]["env"]}

    assert {"RAYPD_TLS_CERT", "RAYPD_TLS_KEY"} <= variables
    assert _secret_files(decode) == {"raypd-tls": "all", "raypd-tokens": ["operator"]}


def test_rdma_pods_get_devices_a_network_and_ncclls_variables() -> None:
    decode = worker_groups(rendered("rdma"))["decode"]["template"]
    [container] = decode["spec"]["containers"]
    variables = of_kind(rendered("rdma"), "ConfigMap", "raypd-nccl")["data"]

    assert decode["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["envFrom"] == [{"configMapRef": {"name": "raypd-nccl"}}]
    assert variables["NCCL_IB_HCA"] == "mlx5"
    assert decode["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}


def test_the_settings_of_the_page_are_the_projects() -> None:
    pinned = (_ROOT / "constraints.txt").read_text()
    project = (_ROOT / "pyproject.toml").read_text()

    assert f"\nray=={RAY_VERSION}\n" in pinned
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == VERSION  # type: ignore[index]  # it is there


@pytest.mark.parametrize(
    ("mistaken", "expected"),
    [
        ({"ingress": {"port": 0}}, "ingress.port = 0: a Service needs a fixed port"),
        ({"ingress": {"http": {"port": 0}}}, "ingress.http.port = 0: a Service needs a fixed port"),
        ({"ingress": {"admin_port": 0}}, "ingress.admin_port = 0: a Service needs a fixed port"),
        (
            {"model": {"model": "/data/m"}, "kubernetes": {"models": {"claim": "weights"}}},
            "model.model = /data/m: it is not below kubernetes.models.mount_path, /models",
        ),
        ({"ray": {"address": "10.0.0.1:6379"}}, "ray.address: the manifests include a Ray cluster"),
        (
            {"cluster_secret_file": "/secret"},
            "cluster_secret_file: in pods the files come from Secrets: set",
        ),
        ({"block_hash_key_file": "/key"}, "come from Secrets: set kubernetes.block_hash_key instead"),
        ({"internal_tls": {"ca": "/ca", "certificate": "/c", "key": "/k"}}, "set kubernetes.internal_tls instead"),
        ({"internal_tls": False, "kubernetes": {"internal_tls": {}}}, "internal_tls is false, but kubernetes.internal"),
        ({"ingress": {"tokens": "/tokens"}}, "here the files come from Secrets; set kubernetes.tls, kubernetes.tokens"),
        ({"prefill": {"num_gpus": 0.5}}, "prefill.num_gpus = 0.5: a pod holds one engine, and whole GPUs"),
        ({"decode": {"num_cpus": 0.5}}, "decode.num_cpus = 0.5: a pod holds one engine, and whole CPUs"),
        ({"decode": {"num_cpus": 0}}, "decode.num_cpus = 0: a pod holds one engine, and whole CPUs"),
        ({"kubernetes": {"decode": {"min_pods": 3, "max_pods": 2}}}, "decode: min_pods is 3 and max_pods is 2"),
        ({"kubernetes": {"head": {"shm_gib": 9}}}, "head.shm_gib = 9: it is part of memory_gib, 4"),
    ],
)
def test_settings_that_no_cluster_could_come_of_are_refused(mistaken: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(expected)):
        render(ClusterConfig.model_validate(mistaken))


def test_the_start_waits_for_pods_to_come_unless_told_otherwise() -> None:
    assert settle(ClusterConfig()).place_timeout_s == 900
    assert settle(ClusterConfig(place_timeout_s=5)).place_timeout_s == 5
