from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

import hub as standin
import tiny
from vlcache_hf import RecomputeSchedule, VLCacheConfig, attach, schedule_hub
from vlcache_hf.runtime import VLCacheRuntime
from vlcache_hf.schedule_lookup import ModelFacts, resolve_schedule

NAME = "vlcache_schedule.json"
OWN = RecomputeSchedule((0.5, 0.25), model_id="org/model", calibrated=True)
SHIPPED = RecomputeSchedule((0.4, 0.2), model_id="org/Base", model_type="qwen3_vl", hidden_size=64)
UNIFORM = RecomputeSchedule.uniform(0.1, 2)
THIS = Path(__file__).parent


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    folder = tmp_path / "shipped"
    SHIPPED.save_pretrained(folder, "Base.json")
    RecomputeSchedule((0.1, 0.1), "org/Base", "qwen3_vl", hidden_size=64).save_pretrained(folder, "Base.b0.1.json")
    monkeypatch.setattr(schedule_hub, "shipped_schedules", lambda: folder)
    monkeypatch.setattr("vlcache_hf.schedule_lookup.shipped_schedules", lambda: folder)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch, shipped):
    with standin.running() as hub:
        standin.use(monkeypatch, hub.url, tmp_path / "hub")
        monkeypatch.setattr(schedule_hub, "PEEK_TIMEOUT_S", 60.0)  # a busy machine is no broken network
        yield hub


def facts(name="", commit=None, model_type="qwen3_vl", hidden_size=64, num_layers=2):
    return ModelFacts(name, num_layers, model_type, hidden_size, commit)


def auto(model, caplog):
    """The schedule that `"auto"` finds, and the one line that says why."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vlcache_hf"):
        schedule = resolve_schedule("auto", model)
    lines = [record.getMessage() for record in caplog.records if "is not used" not in record.getMessage()]
    assert len(lines) == 1
    return schedule, lines[0]


# --- the model's own folder or repository


def test_own_folder(hub, tmp_path, caplog):
    OWN.save_pretrained(tmp_path / "Base")
    schedule, line = auto(facts(str(tmp_path / "Base")), caplog)
    assert schedule == OWN
    assert "of Base: vlcache_schedule.json (from the model's own folder), mean ratio 0.375, made for org/model" in line
    assert caplog.records[-1].levelno == logging.INFO and hub.log == []


def test_own_repository_at_the_commit_that_was_loaded(hub, caplog):
    commit = hub.commit("org/model", {NAME: OWN.to_json_string().encode()})
    hub.commit("org/model", {NAME: SHIPPED.to_json_string().encode()})
    for _ in range(2):
        schedule, line = auto(facts("org/model", commit), caplog)
        assert schedule == OWN and "from the model's own repository" in line
    path = f"/org/model/resolve/{commit}/{NAME}"
    assert hub.log == [f"HEAD {path}", f"HEAD {path}", f"GET {path}"]


def test_a_repository_without_one_is_asked_once(hub, tmp_path, caplog):
    commit = hub.commit("org/model", {"config.json": b"{}"})
    for _ in range(2):
        assert auto(facts("org/model", commit), caplog)[0] == SHIPPED
    assert hub.log == [f"HEAD /org/model/resolve/{commit}/{NAME}"]
    assert (tmp_path / "hub/models--org--model/.no_exist" / commit / NAME).is_file()


def test_what_huggingface_hub_remembers_is_not_asked_again(hub, caplog):
    commit = hub.commit("org/model", {"config.json": b"{}"})
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("org/model", NAME, revision=commit)
    asked = len(hub.log)
    assert auto(facts("org/model", commit), caplog)[0] == SHIPPED
    assert len(hub.log) == asked


def test_no_request_where_none_is_allowed(hub, tmp_path, monkeypatch, caplog, connections):
    commit = hub.commit("org/model", {NAME: OWN.to_json_string().encode()})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/folder").mkdir(parents=True)
    # from a folder, from a folder that is gone, of no origin: these have no commit
    for name in ("org/folder", "org/model", "", "/models/model"):
        assert auto(facts(name), caplog)[0] == SHIPPED
    standin.use(monkeypatch, hub.url, tmp_path / "hub", offline=True)
    assert auto(facts("org/model", commit), caplog)[0] == SHIPPED
    # nor where a schedule would decide nothing
    standin.use(monkeypatch, hub.url, tmp_path / "hub")
    assert resolve_schedule("auto", facts("org/model", commit), lossy=False) == UNIFORM
    assert connections == [] and hub.log == []


@pytest.fixture
def connections(monkeypatch):
    """Addresses of all attempts to connect."""
    attempts: list[object] = []
    connect = socket.socket.connect

    def counted(self: socket.socket, address: object) -> None:
        attempts.append(address)
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", counted)
    return attempts


def test_without_network_the_shipped_one_is_used_after_one_attempt(
    shipped, tmp_path, monkeypatch, caplog, connections
):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        standin.use(monkeypatch, f"http://127.0.0.1:{port}", tmp_path / "hub")
        assert auto(facts("org/model", "a" * 40), caplog)[0] == SHIPPED
    assert connections == [("127.0.0.1", port)]


def test_a_name_that_does_not_resolve_is_waited_for_no_longer_than_the_timeout(shipped, tmp_path, monkeypatch, caplog):
    asked, release = [], threading.Event()

    def stuck(host: object, *args: object, **kwargs: object) -> None:
        asked.append(host)
        release.wait(60)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    monkeypatch.setattr(schedule_hub, "PEEK_TIMEOUT_S", 0.2)
    standin.use(monkeypatch, "http://hub.invalid", tmp_path / "hub")
    assert auto(facts("org/model", "a" * 40), caplog)[0] == SHIPPED
    assert len(asked) == 1
    release.set()


def test_a_hub_that_fails_is_asked_once_and_again_next_time(hub, monkeypatch, caplog):
    monkeypatch.setattr(standin._Handler, "resolve", lambda self, *args: self.answer(503))
    for times in (1, 2):
        assert auto(facts("org/model", "a" * 40), caplog)[0] == SHIPPED
        assert len(hub.log) == times


@pytest.mark.parametrize(
    "content, reason",
    [
        (RecomputeSchedule((0.5,) * 3).to_json_string(), "3 ratios but the model has 2"),
        (RecomputeSchedule((0.5, 0.5), model_type="qwen2_5_vl").to_json_string(), "of type 'qwen2_5_vl'"),
        (json.dumps({**OWN.to_dict(), "version": 2}), "has version 2"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_one_that_does_not_fit_is_skipped_with_one_warning(shipped, tmp_path, caplog, content, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / NAME).write_text(content)
    assert auto(facts(str(folder)), caplog)[0] == SHIPPED
    warnings = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert len(warnings) == 1 and reason in warnings[0] and str(folder / NAME) in warnings[0]


# --- the shipped ones


def test_shipped_by_name(shipped, tmp_path, caplog):
    for name in ("org/Base", "/models/Base", f"{tmp_path}/hub/models--org--Base/snapshots/{'a' * 40}"):
        if name.startswith(str(tmp_path)):
            Path(name).mkdir(parents=True)
        schedule, line = auto(facts(name, hidden_size=None), caplog)
        assert schedule == SHIPPED and "Base.json (shipped for the model), mean ratio 0.300" in line
        assert "not measured on any model: a prior" in line and caplog.records[-1].levelno == logging.WARNING


def card(value: str) -> bytes:
    return f"---\nlicense: mit\nbase_model: {value}\n---\n# Card\n".encode()


@pytest.mark.parametrize("value", ["org/Base", "[x/unknown, org/Base]"])
def test_shipped_for_the_base_model_that_the_card_names(hub, tmp_path, caplog, value):
    folder = tmp_path / "fine-tune"
    folder.mkdir()
    (folder / "README.md").write_bytes(card(value))
    schedule, line = auto(facts(str(folder), hidden_size=None), caplog)
    assert schedule == SHIPPED and "shipped for org/Base, the base model that its card names" in line
    commit = hub.commit("org/tuned", {"README.md": card(value)})
    assert auto(facts("org/tuned", commit, hidden_size=None), caplog)[0] == UNIFORM  # its card is not on disk
    assert hub.asked("README") == []
    hf_hub_download("org/tuned", "README.md", revision=commit)
    assert auto(facts("org/tuned", commit, hidden_size=None), caplog)[0] == SHIPPED


@pytest.mark.parametrize("text", [card("{[")[:30], card("7"), card("../../etc"), b"\xff\xfe", b"---\n- a\n---\n"])
def test_a_strange_card_names_nothing(shipped, tmp_path, caplog, text):
    (tmp_path / "README.md").write_bytes(text)
    assert auto(facts(str(tmp_path), hidden_size=None), caplog)[0] == UNIFORM


def test_shipped_for_the_architecture(shipped, caplog):
    (shipped / "0 broken.json").write_text("{")
    schedule, line = auto(facts("org/Thinking"), caplog)
    assert schedule == SHIPPED
    assert "shipped for another model of the same type, number of layers and width" in line and "org/Base" in line
    for other in ({"model_type": "qwen2_5_vl"}, {"hidden_size": 32}, {"hidden_size": None}):
        assert auto(facts("org/Thinking", **other), caplog)[0] == UNIFORM
    RecomputeSchedule((0.4, 0.2), model_type="qwen3_vl").save_pretrained(shipped, "Base.json")  # says no width
    assert auto(facts("org/Thinking"), caplog)[0] == UNIFORM


def test_nothing_known_is_uniform_and_says_so(shipped, caplog):
    schedule, line = auto(facts("org/other", hidden_size=1), caplog)
    assert schedule == UNIFORM
    assert "No recompute schedule is known for 'org/other'" in line and "first 10 %" in line
    assert caplog.records[-1].levelno == logging.WARNING


def test_another_budget_is_chosen_by_name(shipped, tmp_path):
    assert resolve_schedule("Base.b0.1", facts()).ratios == (0.1, 0.1)
    assert resolve_schedule("Base.b0.1.json", facts()).ratios == (0.1, 0.1)
    assert resolve_schedule(shipped / "Base.b0.1.json", facts()).ratios == (0.1, 0.1)


# --- explicit settings


def test_explicit_settings(tmp_path):
    assert resolve_schedule(0.3, facts()).ratios == (0.3, 0.3)
    assert resolve_schedule(1, facts()).ratios == (1.0, 1.0)
    OWN.save_pretrained(tmp_path)
    assert resolve_schedule(str(tmp_path), facts()) == OWN
    with pytest.raises(ValueError, match="2 ratios but the model has 3"):
        resolve_schedule(tmp_path, facts(num_layers=3))
    with pytest.raises(ValueError, match="2 ratios but the model has 4"):
        resolve_schedule(OWN, facts(num_layers=4))
    with pytest.raises(ValueError, match=r"type 'qwen3_vl' \('org/Base'\), but this model is of type 'qwen2_5_vl'"):
        resolve_schedule(SHIPPED, facts(model_type="qwen2_5_vl"))


def test_a_schedule_of_another_model_warns_once(tmp_path, caplog):
    runtime = VLCacheRuntime(VLCacheConfig(cache_dir=tmp_path, schedule=OWN))
    config = tiny.config("qwen3_vl")
    config._name_or_path = "org/other"
    for _ in range(2):
        assert runtime.options(None, config, 2).schedule == OWN
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "made for 'org/model' and is used for 'org/other'" in warnings[0]
    caplog.clear()
    for name in ("org/model", "/models/renamed", ""):  # the same model, and models of unknown origin
        config._name_or_path = name
        runtime = VLCacheRuntime(VLCacheConfig(cache_dir=tmp_path, schedule=OWN))
        assert runtime.options(None, config, 2).schedule == OWN
    assert caplog.records == []


def test_a_hub_id_in_the_settings_is_read_when_the_model_is_loaded(hub, tmp_path):
    wanted = RecomputeSchedule((0.4, 0.3, 0.2, 0.1), model_type="qwen3_vl")
    hub.commit("org/schedules", {NAME: wanted.to_json_string().encode()})
    ours = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache", "schedule": "org/schedules"})
    asked = len(hub.log)
    assert asked == 2
    assert ours.vlcache.options(None, ours.config, 4).schedule == wanted
    assert len(hub.log) == asked
    with pytest.raises(OSError, match="No schedule 'org/nothing'"):
        attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache", "schedule": "org/nothing"})
    with pytest.raises(ValueError, match="qwen3_vl.*qwen2_5_vl"):
        attach(tiny.stock("qwen2_5_vl"), {"cache_dir": tmp_path / "cache", "schedule": "org/schedules"})


def test_the_commit_is_that_of_the_load(hub, tmp_path):
    files = {"config.json": b"{}"}
    main, old = hub.commit("org/model", {**files, "x": b""}), hub.commit("org/model", files, "v1")
    config = tiny.config("qwen3_vl")
    config._name_or_path = "org/model"
    assert ModelFacts.of(config, 4) == ModelFacts("org/model", 4, "qwen3_vl", 64, None)  # nothing in the cache
    for revision in ("main", "v1"):
        hf_hub_download("org/model", "config.json", revision=revision)
    assert ModelFacts.of(config, 4).commit == main
    config._commit_hash = old
    assert ModelFacts.of(config, 4).commit == old
    assert schedule_hub.loaded_commit("org/model", "v1") == schedule_hub.loaded_commit("org/model", old) == old
    assert schedule_hub.loaded_commit("org/model", cache_dir=tmp_path / "other") is None
    for name in ("", "model", "a--b/c", "/models/model", str(tmp_path)):
        assert schedule_hub.loaded_commit(name) is None


CHILD = """
import json, sys
import tiny, vlcache_hf
from transformers import AutoModelForImageTextToText

vlcache_hf.schedule_hub.PEEK_TIMEOUT_S = 60.0  # a busy machine is no broken network
found = []
for cls, repo, revision in (
    (AutoModelForImageTextToText, "org/with", None),
    (AutoModelForImageTextToText, "org/with", "v1"),
    (vlcache_hf.VLCacheQwen3VLForConditionalGeneration, "org/with", "v1"),
    (AutoModelForImageTextToText, "org/without", None),
):
    settings = {"cache_dir": sys.argv[1] + str(len(found))}
    kwargs = {"revision": revision} if revision else {}
    model = cls.from_pretrained(repo, attn_implementation="vlcache", vlcache_config=settings, **kwargs)
    picture = tiny.image(1)
    for text in (1, 2):
        tiny.generate(model, tiny.batch(tiny.prompt(tiny.text(text, 4), picture, tiny.text(9, 3))), 2)
    schedule = model.vlcache.options(None, model.config, 4).schedule
    found.append([model.vlcache.last_request.images[0].kv, list(schedule.ratios)])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_models_from_the_hub_and_then_offline(tmp_path):
    """With the environment variables that users set, and a `generate()` that reuses."""
    tiny.stock("qwen3_vl").save_pretrained(tmp_path / "model")
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with standin.running() as hub:
        for branch, ratios in (("main", (0.4, 0.3, 0.2, 0.1)), ("v1", (0.5, 0.5, 0.5, 0.5))):
            content = RecomputeSchedule(ratios).to_json_string().encode()
            hub.commit("org/with", {**files, NAME: content}, branch)
        without = hub.commit("org/without", files)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(THIS), str(THIS.parent)]),
        }
        environment.pop("HF_HUB_CACHE", None)
        for offline in ("0", "1"):
            hub.log.clear()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(tmp_path / f"cache{offline}")],
                env={**environment, "HF_HUB_OFFLINE": offline},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            v1 = ["reused", [0.5] * 4]
            assert json.loads(done.stdout) == [["reused", [0.4, 0.3, 0.2, 0.1]], v1, v1, ["reused", [0.1] * 4]]
            asked = hub.asked(NAME, "org/without")
            assert asked == ([] if offline == "1" else [f"HEAD /org/without/resolve/{without}/{NAME}"])
        assert hub.log == []
