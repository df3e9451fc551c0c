"""What entries say for people, and that it decides nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from vlcache_hf import attach
from vlcache_hf.cli import main
from vlcache_hf.keys import ModelKeys
from vlcache_hf.options import model_label
from vlcache_hf.store.paths import walk_entries

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = ModelKeys("v", "t")


def label(name):
    return model_label(SimpleNamespace(_name_or_path=name, model_type="qwen3_vl"), KEYS)


def test_a_label_names_the_model_and_its_state(tmp_path):
    folder = tmp_path / "my-model"
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-VL-8B" / "snapshots" / "0a1b2c"
    for path in (folder, snapshot):
        path.mkdir(parents=True)
    names = [label(name).split("@")[0] for name in ("Qwen/Qwen3-VL-8B", "", str(folder), str(snapshot))]
    assert names == ["Qwen/Qwen3-VL-8B", "qwen3_vl", "my-model", "Qwen/Qwen3-VL-8B"]
    assert re.fullmatch(r"qwen3_vl@[0-9a-f]{12}", label(""))
    config = SimpleNamespace(_name_or_path="", model_type="qwen3_vl")
    assert len({model_label(config, ModelKeys(v, t)) for v in "ab" for t in "ab"}) == 4
    assert len(label("x" * 10_000)) < 200
    label("caf\udce9").encode()  # a file name that is not UTF-8


@pytest.mark.parametrize("name", ["model-\udce9", "other"])
def test_labels_decide_nothing(tmp_path, name):
    kinds = []
    for model_name in (name, "elsewhere"):  # the same weights under two names
        model = attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path})
        model.config._name_or_path = model_name
        with torch.no_grad():
            model(**tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1), tiny.text(2, 3))), logits_to_keep=1)
        kinds += tiny.kinds(model)
        assert model.vlcache.stats().faults == 0
    assert kinds == ["miss", "exact"]
    headers = []
    for key in walk_entries(tmp_path):
        data = (tmp_path / key).read_bytes()
        headers.append(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])
    assert len(headers) == 2
    assert all(header["field.model"].startswith(name[:5]) and header["field.tokens"] > "0" for header in headers)


def test_the_readme_shows_commands_that_exist():
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Operating it")[1].split("\n## ")[0]
    lines = [line.split("#")[0].split() for line in section.splitlines() if line.startswith("vlcache ")]
    assert {line[1] for line in lines} == set(main.commands)
    for line in lines:
        known = {name for option in main.commands[line[1]].params for name in option.opts}
        assert {word for word in line if word.startswith("--")} <= known


def test_a_wheel_would_have_the_script():
    assert 'vlcache = "vlcache_hf.cli:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
