"""Tests of actors/config.py."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.config import CacheConfig
from cluster.config import DEMO_MODEL, ClusterConfig, load_cluster_config
from cluster.errors import InvalidConfig
from cluster.pool.engines.engine_placement import engine_bundle
from cluster.routing.engine_connection import EngineRole
from kv_transfer.config import KVTransferConfig


def mistakes(path: Path | None, **overrides: object) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_cluster_config(path, overrides)
    return caught.value.mistakes


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_without_arguments_it_is_the_demo_model_on_one_prefill_and_one_decode_engine() -> None:
    config = load_cluster_config(None, {})
    assert config.model.model == str(DEMO_MODEL)
    assert (config.prefill.count, config.decode.count, config.both.count) == (1, 1, 0)


def test_the_command_line_wins_over_the_file_and_none_means_not_given(yaml_file: Path) -> None:
    yaml_file.write_text("prefill: {count: 3, num_cpus: 2}\ndecode: {count: 4}\n")
    config = load_cluster_config(yaml_file, {"prefill": {"count": 5}, "decode": {"count": None}})
    assert (config.prefill.count, config.prefill.num_cpus, config.decode.count) == (5, 2, 4)


def test_a_command_line_without_settings_leaves_the_defaults_alone() -> None:
    assert load_cluster_config(None, {"ingress": {"port": None}}) == load_cluster_config(None, {})


def test_every_mistake_is_named_with_its_field_its_value_and_what_is_allowed(yaml_file: Path) -> None:
    yaml_file.write_text("scheduler: {max_num_seqs: -1, policy: random}\nspeed: fast\n")
    assert mistakes(yaml_file) == [
        "scheduler.max_num_seqs = -1: Input should be greater than or equal to 1",
        "scheduler.policy = 'random': Input should be 'fcfs' or 'priority'",
        "speed: there is no such setting",
    ]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 0), (0, 2)])
def test_engines_of_one_role_are_a_cluster(num_prefill: int, num_decode: int) -> None:
    config = load_cluster_config(None, {"prefill": {"count": num_prefill}, "decode": {"count": num_decode}})
    assert (config.prefill.count, config.decode.count) == (num_prefill, num_decode)


def test_a_cluster_without_engines_that_serve_is_refused() -> None:
    (mistake,) = mistakes(None, prefill={"count": 0}, decode={"count": 0}, encode={"count": 1})
    assert "no engines: set prefill.count, decode.count or both.count to at least 1" in mistake


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            {"prefill": {"cache": {"key_order": "plain"}}, "decode": {"cache": {"key_order": "transposed"}}},
            "prefill.cache.key_order is plain and decode.cache.key_order is transposed",
        ),
        (
            {"cache": {"key_order": "plain"}, "decode": {"cache": {"key_order": "transposed"}}},
            "cache.key_order is plain and decode.cache.key_order is transposed",
        ),
    ],
)
def test_two_orders_of_keys_are_refused_with_the_names_of_both_settings(
    overrides: dict[str, object], names: str
) -> None:
    (mistake,) = mistakes(None, **overrides)
    assert mistake.startswith(f"cluster: {names}: engines exchange blocks as they are")


@pytest.mark.parametrize(
    "overrides",
    [
        {"decode": {"cache": {"key_order": "transposed"}}},
        {"cache": {"key_order": "transposed"}, "decode": {"cache": {"block_size": 32}}},
        {"cache": {"key_order": "plain"}, "both": {"count": 0, "cache": {"key_order": "transposed"}}},
    ],
)
def test_one_order_of_keys_may_be_named_for_some_roles_only(overrides: dict[str, object]) -> None:
    assert load_cluster_config(None, overrides)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (mistake,) = mistakes(None, model={"model": str(tmp_path)})
    assert "no config.json" in mistake


@pytest.mark.parametrize(("text", "mistake"), [("- 1", "must be a mapping"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_mapping_is_refused(yaml_file: Path, text: str, mistake: str) -> None:
    yaml_file.write_text(text)
    assert mistake in mistakes(yaml_file)[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.yaml: cannot be read"):
        load_cluster_config(tmp_path / "nowhere.yaml", {})


def test_a_groups_own_scheduler_settings_replace_the_clusters() -> None:
    overrides = {"scheduler": {"max_num_seqs": 8}, "prefill": {"scheduler": {"max_num_batched_tokens": 2048}}}
    config = load_cluster_config(None, overrides)
    assert config.engine_config(EngineRole.PREFILL).scheduler.max_num_batched_tokens == 2048
    assert config.engine_config(EngineRole.DECODE).scheduler.max_num_seqs == 8


def test_the_engines_of_a_role_may_have_ranks_which_reserve_on_one_node_together() -> None:
    parallel = {"tensor_parallel_size": 4}
    config = load_cluster_config(None, {"decode": {"num_cpus": 2, "num_gpus": 1, "parallel": parallel}})
    assert (config.num_ranks(EngineRole.PREFILL), config.num_ranks(EngineRole.DECODE)) == (1, 4)
    assert config.engine_config(EngineRole.DECODE).parallel.tensor_parallel_size == 4
    assert config.num_cpus == 1 + 4 * 2
    assert engine_bundle(config, EngineRole.DECODE) == {"CPU": 8, "GPU": 4}


def test_a_groups_own_kv_transfer_settings_replace_the_clusters() -> None:
    config = load_cluster_config(None, {"kv_transfer": {"checksum": True}, "decode": {"kv_transfer": {"max_links": 3}}})
    assert config.engine_config(EngineRole.PREFILL).kv_transfer == KVTransferConfig(checksum=True)
    assert config.engine_config(EngineRole.DECODE).kv_transfer == KVTransferConfig(max_links=3)


def test_the_settings_that_give_engines_stores_are_known_by_their_names() -> None:
    def settings(**overrides: object) -> tuple[str, ...]:
        return load_cluster_config(None, overrides).store_settings

    stores = {"stores": [{"name": "disk"}]}
    assert settings() == ()
    assert settings(kv_transfer=STORES | stores) == ("kv_transfer.cpu_cache_gib", "kv_transfer.stores")
    assert settings(decode={"count": 1, "kv_transfer": stores}) == ("decode.kv_transfer.stores",)
    assert settings(prefill={"count": 0, "kv_transfer": stores}, decode={"count": 1}) == (), "nobody has them"


def test_block_sizes_are_known_by_the_names_of_their_settings() -> None:
    def sizes(**overrides: object) -> dict[str, int]:
        return load_cluster_config(None, overrides).block_sizes

    assert sizes() == {"cache.block_size": 16}
    own = {"cache": {"block_size": 32}}
    assert sizes(decode={"count": 1} | own) == {"cache.block_size": 16, "decode.cache.block_size": 32}
    assert sizes(decode={"count": 1}, both={"count": 0} | own) == {"cache.block_size": 16}


STORES = {"cpu_cache_gib": 1.0}
NO_CACHE = {"enable_prefix_caching": False}
HEADS = "LlamaForCausalLM cannot be served so: its 4 attention heads cannot be shared evenly"
NEEDS = "kv_transfer.cpu_cache_gib and kv_transfer.stores need cache.enable_prefix_caching"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"kv_transfer": STORES, "cache": NO_CACHE}, [f"cluster: {NEEDS}"]),
        ({"decode": {"kv_transfer": STORES, "cache": NO_CACHE}}, [f"decode: {NEEDS}"]),
        ({"decode": {"kv_transfer": STORES}, "cache": NO_CACHE}, [f"decode: {NEEDS}"]),
        ({"kv_transfer": STORES, "prefill": {"cache": NO_CACHE}}, [f"prefill: {NEEDS}"]),
        (
            {"kv_transfer": STORES, "prefill": {"cache": NO_CACHE}, "both": {"cache": NO_CACHE}},
            [f"prefill: {NEEDS}", f"both: {NEEDS}"],
        ),
        (
            {"decode": {"parallel": {"tensor_parallel_size": 9}}},
            ["decode.parallel.tensor_parallel_size = 9: Input should be less than or equal to 8"],
        ),
        (
            {"decode": {"parallel": {"tensor_parallel_size": 3}}},
            [f"decode.parallel.tensor_parallel_size = 3: {HEADS} by 3 ranks"],
        ),
        (
            {"parallel": {"tensor_parallel_size": 8}, "decode": {"parallel": {"tensor_parallel_size": 2}}},
            [f"parallel.tensor_parallel_size = 8: {HEADS} by 8 ranks"],
        ),
    ],
)
def test_what_no_engine_could_start_with_is_refused_under_its_groups_name(
    overrides: dict[str, object], expected: list[str]
) -> None:
    assert mistakes(None, **overrides) == expected


def test_a_cluster_whose_groups_all_override_a_mistake_is_none() -> None:
    cache = {"cache": {"enable_prefix_caching": True}}
    groups = {role.value: cache for role in EngineRole}
    assert load_cluster_config(None, {"kv_transfer": STORES, "cache": NO_CACHE, **groups})


def test_a_config_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(ValidationError, match=NEEDS):
        ClusterConfig(kv_transfer=KVTransferConfig(cpu_cache_gib=1), cache=CacheConfig(enable_prefix_caching=False))


def test_the_file_of_the_clusters_secret_is_named_alike_for_every_node() -> None:
    settings = {"cluster_secret_file": "/etc/raypd/secret"}
    assert ClusterConfig.model_validate(settings).cluster_secret_file == Path("/etc/raypd/secret")
    with pytest.raises(ValidationError, match="has to be an absolute path, which is the same on every node"):
        ClusterConfig.model_validate({"cluster_secret_file": "secret"})
