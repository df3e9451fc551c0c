from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import GenerationConfig

import hub as standin
from vlcache_hf import RecomputeSchedule

A = RecomputeSchedule(
    (0.3, 0.3, 0.1, 0.0), model_id="org/model", model_type="qwen3_vl", budget=0.2, method={"name": "prior", "seed": 1}
)
B = RecomputeSchedule((0.2, 0.1, 0.1, 0.1), model_id="org/model", calibrated=True)
NAME = "vlcache_schedule.json"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with standin.running() as hub:
        standin.use(monkeypatch, hub.url, tmp_path / "hub")
        yield hub


def test_a_schedule_is_read_from_the_hub_and_then_from_its_cache(hub, tmp_path, monkeypatch):
    hub.commit("org/model", {NAME: A.to_json_string().encode()})
    assert RecomputeSchedule.from_pretrained("org/model") == A
    assert hub.log == [f"HEAD /org/model/resolve/main/{NAME}", f"GET /org/model/resolve/main/{NAME}"]
    standin.use(monkeypatch, hub.url, tmp_path / "hub", offline=True)
    assert RecomputeSchedule.from_pretrained("org/model") == A
    assert len(hub.log) == 2
    standin.use(monkeypatch, hub.url, tmp_path / "hub")
    assert RecomputeSchedule.from_pretrained("org/model", local_files_only=True) == A
    assert len(hub.log) == 2


def test_revision_subfolder_cache_dir_and_force_download(hub, tmp_path):
    old = hub.commit("org/model", {NAME: A.to_json_string().encode(), f"sub/{NAME}": B.to_json_string().encode()})
    hub.commit("org/model", {NAME: B.to_json_string().encode()})
    assert RecomputeSchedule.from_pretrained("org/model") == B
    assert RecomputeSchedule.from_pretrained("org/model", revision=old) == A
    assert RecomputeSchedule.from_pretrained("org/model", subfolder="sub", revision=old) == B
    assert RecomputeSchedule.from_pretrained("org/model", cache_dir=tmp_path / "elsewhere") == B
    assert (tmp_path / "elsewhere" / "models--org--model").is_dir()
    asked = len(hub.asked("GET"))
    assert RecomputeSchedule.from_pretrained("org/model", force_download=True) == B
    assert len(hub.asked("GET")) == asked + 1


def test_several_budgets_in_one_repository(hub):
    other = "vlcache_schedule.b0.025.json"
    hub.commit("org/model", {NAME: A.to_json_string().encode(), other: B.to_json_string().encode()})
    assert RecomputeSchedule.from_pretrained("org/model") == A
    assert RecomputeSchedule.from_pretrained("org/model", other) == B
    assert RecomputeSchedule.from_pretrained(f"org/model/{other}") == B


def test_a_path_goes_before_a_hub_id(hub, tmp_path, monkeypatch):
    hub.commit("org/model", {NAME: A.to_json_string().encode()})
    monkeypatch.chdir(tmp_path)
    B.save_pretrained("org/model")
    assert RecomputeSchedule.from_pretrained("org/model") == B
    (tmp_path / "org/model" / NAME).unlink()
    with pytest.raises(FileNotFoundError, match=f"The folder 'org/model' has no {NAME}"):
        RecomputeSchedule.from_pretrained("org/model")
    assert hub.log == []


@pytest.mark.parametrize(
    "name", ["mine", "runs/mine.json", "a/b/c", "./org/name", "/org/name", "org/na me", "", "a/.."]
)
def test_what_is_neither_path_nor_hub_id_asks_nobody(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"No schedule '{name}': it is no file or folder here"):
        RecomputeSchedule.from_pretrained(name)
    assert hub.log == []


def test_what_the_hub_does_not_have(hub):
    hub.commit("org/model", {"config.json": b"{}"})
    with pytest.raises(OSError, match=f"'org/model'.*does not appear to have a file named {NAME}"):
        RecomputeSchedule.from_pretrained("org/model")
    with pytest.raises(OSError, match="'org/other'.*not a valid model identifier"):
        RecomputeSchedule.from_pretrained("org/other")
    with pytest.raises(OSError, match="v9 is not a valid git identifier"):
        RecomputeSchedule.from_pretrained("org/model", revision="v9")
    hub.commit("org/model", {NAME: b"<html>"})
    with pytest.raises(ValueError, match=f"{NAME}' is not JSON"):
        RecomputeSchedule.from_pretrained("org/model")


def test_offline_without_the_file_is_the_error_of_transformers(hub, tmp_path, monkeypatch):
    standin.use(monkeypatch, hub.url, tmp_path / "hub", offline=True)
    with pytest.raises(OSError) as stock:
        GenerationConfig.from_pretrained("org/model")
    with pytest.raises(OSError, match="No schedule 'org/model': it is no file or folder here") as ours:
        RecomputeSchedule.from_pretrained("org/model")
    assert str(stock.value) in str(ours.value) and "couldn't find them in the cached files" in str(ours.value)
    assert hub.log == []


def test_push_makes_the_repository_and_a_card(hub):
    url = A.push_to_hub("org/model")
    assert str(url) == f"{hub.url}/org/model/commit/{hub.refs['org/model']['main']}"
    assert hub.messages == ["Upload RecomputeSchedule"]
    assert RecomputeSchedule.from_pretrained("org/model") == A
    card = hub.text("org/model", "README.md")
    assert "| 0 to 1 | 0.3 |\n| 2 | 0.1 |\n| 3 | 0 |" in card
    assert '"schedule": "org/model/vlcache_schedule.json"' in card
    assert "Mean ratio 0.175, for a budget of 0.2; **not measured on the model**" in card
    assert "- name: prior\n- seed: 1" in card


def test_push_leaves_the_rest_of_the_card_alone(hub):
    before = "---\nlicense: apache-2.0\n---\r\n# Mine\r\n\r\nText \\1 with $ in it.\n"
    hub.commit("org/model", {"README.md": before.encode()})
    A.push_to_hub("org/model")
    first = hub.text("org/model", "README.md")
    assert first.startswith(before)
    hub.commit("org/model", {"README.md": (first + "\nBehind it.\n").encode()})
    A.push_to_hub("org/model", commit_message="again")
    assert hub.text("org/model", "README.md") == first + "\nBehind it.\n"
    B.push_to_hub("org/model")
    second = hub.text("org/model", "README.md")
    assert second.startswith(before) and second.endswith("\n\nBehind it.\n")
    assert second.count("vlcache_schedule.json: begin") == 1 and "0.175" not in second
    A.push_to_hub("org/model", file_name="vlcache_schedule.b0.025.json")
    third = hub.text("org/model", "README.md")
    assert third.startswith(second) and "org/model/vlcache_schedule.b0.025.json" in third
    assert RecomputeSchedule.from_pretrained("org/model") == B
    assert RecomputeSchedule.from_pretrained("org/model/vlcache_schedule.b0.025.json") == A


def test_push_to_a_branch_and_as_a_pull_request(hub):
    hub.commit("org/model", {"README.md": b"main"})
    A.push_to_hub("org/model", revision="mine")
    assert RecomputeSchedule.from_pretrained("org/model", revision="mine") == A
    assert hub.text("org/model", "README.md", "mine").startswith("main\n\n")
    B.push_to_hub("org/model", create_pr=True)
    assert RecomputeSchedule.from_pretrained("org/model", revision="refs/pr/1") == B
    assert NAME not in hub.commits[hub.refs["org/model"]["main"]]


def test_push_does_not_overwrite_a_card_that_changes_meanwhile(hub):
    hub.commit("org/model", {"README.md": b"old"})
    hub.before_commit = lambda: hub.commit("org/model", {"README.md": b"new"})
    with pytest.raises(HfHubHTTPError, match="412"):
        A.push_to_hub("org/model")
    assert hub.text("org/model", "README.md") == "new"


def test_save_pretrained_pushes_too(hub, tmp_path):
    A.save_pretrained(tmp_path / "model", push_to_hub=True)
    assert hub.refs.keys() == {"me/model"}
    A.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="org/other")
    assert json.loads(hub.text("org/other", NAME)) == A.to_dict()
    with pytest.raises(TypeError, match=r"\['repo_id'\] mean something with `push_to_hub=True` only"):
        A.save_pretrained(tmp_path, repo_id="org/other")
