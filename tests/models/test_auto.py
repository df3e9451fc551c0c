"""Loading: what the Auto classes and the concrete classes give, with and without "vlcache"."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

import vlcache_hf
from tests import tiny
from vlcache_hf import VLCacheConfig
from vlcache_hf.attention import interface
from vlcache_hf.models.auto import MODEL_CLASSES

ROOT = Path(__file__).parents[2]
AUTO = [AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM]
OURS = dict(zip(tiny.ARCHITECTURES, MODEL_CLASSES))
REQUEST = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def reference(architecture):
    return tiny.stock(architecture)


@pytest.fixture(scope="module")
def folder(architecture, reference, tmp_path_factory):
    path = tmp_path_factory.mktemp(architecture)
    reference.save_pretrained(path)
    return path


@pytest.fixture
def settings(tmp_path):
    return {"cache_dir": str(tmp_path / "cache")}


def serves(model, reference) -> None:
    """The model answers as stock, first cold and then from its cache."""
    wanted = tiny.generate(reference, REQUEST, 4).tolist()
    for kind in ("miss", "exact"):
        assert tiny.generate(model, REQUEST, 4).tolist() == wanted
        assert tiny.kinds(model) == [kind]
    assert model.vlcache.stats().vision_calls == 1


def same_weights(one, other) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# --- with "vlcache"


@pytest.mark.parametrize("auto", AUTO, ids=lambda auto: auto.__name__)
def test_auto_classes(auto, architecture, reference, folder, settings):
    model = auto.from_pretrained(folder, attn_implementation="vlcache", vlcache_config=settings)
    assert type(model) is OURS[architecture] and isinstance(model, tiny.STOCK[architecture])
    assert same_weights(model, reference)
    assert not model.training and model.dtype == torch.float32
    serves(model, reference)


def test_concrete_classes(architecture, reference, folder, settings):
    model = OURS[architecture].from_pretrained(folder, vlcache_config=settings)
    assert type(model) is OURS[architecture] and same_weights(model, reference)
    assert model.config.text_config._attn_implementation == "vlcache"
    serves(model, reference)


def test_concrete_classes_with_a_config(architecture, reference, folder, settings):
    config = AutoConfig.from_pretrained(folder)
    model = OURS[architecture].from_pretrained(folder, config=config, vlcache_config=settings)
    serves(model, reference)


def test_concrete_classes_switched_off(architecture, reference, folder, settings):
    model = OURS[architecture].from_pretrained(folder, attn_implementation="sdpa", vlcache_config=settings)
    assert tiny.generate(model, REQUEST, 4).tolist() == tiny.generate(reference, REQUEST, 4).tolist()
    assert model.vlcache.last_request is None
    model.set_attn_implementation("vlcache")
    serves(model, reference)


@pytest.mark.parametrize(
    "wanted",
    [
        "vlcache",
        {"text_config": "vlcache"},
        {"": "vlcache"},
        {"text_config": "vlcache", "vision_config": "eager"},
        {"text_config": "vlcache", "vision_config": "vlcache"},
        {"": "sdpa", "text_config": "vlcache"},
    ],
    ids=str,
)
def test_forms_of_attn_implementation(wanted, architecture, reference, folder, settings):
    model = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation=copy.deepcopy(wanted), vlcache_config=settings
    )
    assert type(model) is OURS[architecture]  # whose cache is then on, never silently off
    assert model.config.text_config._attn_implementation == "vlcache"
    kernel = model.model.visual.config._attn_implementation
    assert kernel == ("eager" if isinstance(wanted, dict) and wanted.get("vision_config") == "eager" else "sdpa")
    serves(model, reference)


@pytest.mark.parametrize("level", ["config", "text_config"])
def test_the_attribute_of_a_config(level, architecture, reference, folder, settings):
    config = AutoConfig.from_pretrained(folder)
    (config if level == "config" else config.text_config)._attn_implementation = "vlcache"
    model = AutoModelForImageTextToText.from_pretrained(folder, config=config, vlcache_config=settings)
    assert type(model) is OURS[architecture]
    serves(model, reference)


def test_a_config_loaded_with_attn_implementation(architecture, reference, folder, settings):
    config = AutoConfig.from_pretrained(folder, attn_implementation="vlcache")
    model = AutoModelForImageTextToText.from_pretrained(folder, config=config, vlcache_config=settings)
    assert type(model) is OURS[architecture]
    serves(model, reference)


@pytest.mark.parametrize("auto", AUTO, ids=lambda auto: auto.__name__)
def test_from_config(auto, architecture, settings):
    config = tiny.config(architecture)
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="vlcache", vlcache_config=settings)
    torch.manual_seed(0)
    reference = tiny.STOCK[architecture](tiny.config(architecture)).eval()
    assert type(model) is OURS[architecture] and same_weights(model, reference)
    for m in (model.eval(), reference):
        m.generation_config.eos_token_id = None
    serves(model, reference)


def test_constructors(architecture, settings):
    torch.manual_seed(0)
    model = OURS[architecture](tiny.config(architecture)).eval()
    assert model.config.text_config._attn_implementation == "vlcache"
    assert model.model.visual.config._attn_implementation == "sdpa"
    vlcache_hf.attach(model, settings)
    model.generation_config.eos_token_id = None
    serves(model, tiny.stock(architecture))


def test_output_loading_info(architecture, folder, settings):
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="vlcache", vlcache_config=settings, output_loading_info=True
    )
    assert type(model) is OURS[architecture]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype, architecture, folder, settings):
    model = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="vlcache", vlcache_config=settings, dtype=dtype
    )
    assert model.dtype == dtype
    tiny.generate(model, REQUEST, 2)
    first = tiny.generate(model, REQUEST, 2)
    assert tiny.kinds(model) == ["exact"] and torch.equal(first, tiny.generate(model, REQUEST, 2))


def test_settings_as_an_object_and_as_a_dict(architecture, folder, tmp_path):
    fields = {"cache_dir": str(tmp_path / "x"), "schedule": 0.25, "namespace": "n", "contexts_per_image": 2}
    for value in (VLCacheConfig(**fields), dict(fields)):
        model = AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="vlcache", vlcache_config=value
        )
        assert model.vlcache.config == VLCacheConfig(**fields)


def load(folder, value):
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="vlcache", vlcache_config=value)


def test_wrong_settings(folder, tmp_path):
    with pytest.raises(TypeError, match="cachedir.*cache_dir"):
        load(folder, {"cachedir": "x"})
    with pytest.raises(TypeError, match="VLCacheConfig or a dict.*str"):
        load(folder, "x")
    with pytest.raises(ValueError, match="reuse.*'lossy'.*'exact'.*'maybe'"):
        load(folder, {"reuse": "maybe"})
    with pytest.raises(ValueError, match="max_disk_bytes.*-1"):
        load(folder, {"max_disk_bytes": -1})
    with pytest.raises(ValueError, match="contexts_per_image.*0"):
        load(folder, {"contexts_per_image": 0})
    with pytest.raises(ValueError, match=r"schedule.*1\.5"):
        load(folder, {"schedule": 1.5})
    with pytest.raises(ValueError, match="attn_implementation"):
        AutoModelForImageTextToText.from_pretrained(folder, vlcache_config={"cache_dir": str(tmp_path)})


@pytest.mark.parametrize(
    "field, value",
    [("max_disk_bytes", "64GB"), ("contexts_per_image", "4"), ("contexts_per_image", 2.5), ("namespace", None)],
)
def test_settings_of_another_type(field, value):
    with pytest.raises((TypeError, ValueError), match=field):
        VLCacheConfig(**{field: value})


# --- without "vlcache"


@pytest.mark.parametrize("wanted", [None, "sdpa", "eager", {"text_config": "eager"}], ids=str)
def test_a_plain_load_is_stock(wanted, architecture, reference, folder):
    kwargs = {} if wanted is None else {"attn_implementation": wanted}
    for auto in AUTO:
        model = auto.from_pretrained(folder, **kwargs)
        stock = type(reference.model) if auto is AutoModel else type(reference)
        assert type(model) is stock and not hasattr(model, "vlcache")
        assert "vlcache" not in json.dumps(model.config.to_dict())
    assert tiny.generate(model, REQUEST, 4).tolist() == tiny.generate(reference, REQUEST, 4).tolist()


def test_a_plain_from_config_is_stock(architecture, reference):
    for auto in AUTO:
        model = auto.from_config(tiny.config(architecture))
        assert type(model) is (type(reference.model) if auto is AutoModel else type(reference))


def test_plain_classes_are_stock(architecture, folder):
    assert type(tiny.STOCK[architecture].from_pretrained(folder)) is tiny.STOCK[architecture]


def test_a_plain_load_after_a_load_of_ours(architecture, reference, folder, settings):
    load(folder, settings)
    assert type(AutoModelForImageTextToText.from_pretrained(folder)) is type(reference)


def test_other_architectures_are_untouched():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    assert type(AutoModel.from_config(config)) is transformers.LlamaModel


def test_auto_mappings_can_be_pickled(architecture):
    for auto in AUTO:
        entry = auto._model_mapping[OURS[architecture].config_class]
        assert pickle.loads(pickle.dumps(entry)) is entry
        assert copy.deepcopy(entry) is entry
        assert entry.__name__ == (entry.stock.__name__) and "VLCache" not in entry.__name__
        assert set(pickle.loads(pickle.dumps(auto._model_mapping._extra_content))) == set(
            auto._model_mapping._extra_content
        )


def test_registering_twice_changes_nothing(architecture):
    before = [auto._model_mapping[OURS[architecture].config_class] for auto in AUTO]
    vlcache_hf.models.register()
    vlcache_hf.attention.register()
    assert [auto._model_mapping[OURS[architecture].config_class] for auto in AUTO] == before


def test_what_pipelines_read_of_the_mapping(architecture):
    """`type(model).__name__` must be among the names of the mapping's values."""
    mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    names = {cls.__name__ for cls in mapping._extra_content.values()}
    assert OURS[architecture].__name__ == tiny.STOCK[architecture].__name__ in names


# --- the model as others see it


def test_signatures_are_those_of_stock(architecture):
    ours, stock = OURS[architecture], tiny.STOCK[architecture]
    core = type(tiny.stock(architecture).model)
    for name in ("forward", "prepare_inputs_for_generation", "get_image_features"):
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(stock, name)), name
    for name in ("forward", "get_image_features"):
        ours_core = ours.vlcache_core_class
        assert inspect.signature(getattr(ours_core, name)) == inspect.signature(getattr(core, name)), name


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("how", ["loaded", "attached"])
def test_save_pretrained_writes_what_stock_writes(how, architecture, reference, folder, settings, tmp_path):
    from safetensors.torch import load_file

    plain = AutoModelForImageTextToText.from_pretrained(folder)
    plain.save_pretrained(tmp_path / "stock")
    if how == "loaded":
        model = load(folder, settings)
    else:
        model = vlcache_hf.attach(AutoModelForImageTextToText.from_pretrained(folder), settings)
    tiny.generate(model, REQUEST, 2)
    model.save_pretrained(tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "stock")
    for name in files(tmp_path / "stock"):
        one, other = tmp_path / "stock" / name, tmp_path / "ours" / name
        if name.endswith(".json"):
            assert json.loads(one.read_text()) == json.loads(other.read_text()), name
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [tiny.STOCK[architecture].__name__]
    tensors = [load_file(tmp_path / where / "model.safetensors") for where in ("stock", "ours")]
    assert set(tensors[0]) == set(tensors[1])
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def python(code: str, *arguments: object, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240)


_WITHOUT = """
import sys, torch
from transformers import AutoModelForImageTextToText
from tests import tiny
assert "vlcache_hf" not in sys.modules
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
request = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))
print("TOKENS", tiny.generate(model, request, 4).tolist())
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1], attn_implementation="vlcache")
except Exception as error:
    print("ERROR", type(error).__name__, str(error).replace(chr(10), " "))
assert "vlcache_hf" not in sys.modules
"""


def test_a_saved_model_loads_without_the_library(tmp_path):
    model = vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": tmp_path / "cache"})
    wanted = tiny.generate(model, REQUEST, 4).tolist()
    model.save_pretrained(tmp_path / "model")
    done = python(_WITHOUT, tmp_path / "model")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"TOKENS {wanted}" in done.stdout
    # forgetting the import is an error that names the value
    error = next(line for line in done.stdout.splitlines() if line.startswith("ERROR"))
    assert "vlcache" in error


_IMPORT = """
import sys
import vlcache_hf
assert "flash_attn" not in sys.modules
from tests import tiny
model = vlcache_hf.attach(tiny.stock("qwen3_vl"), {"cache_dir": sys.argv[1]})
request = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)))
tokens = [tiny.generate(model, request, 4).tolist() for _ in range(2)]
assert tokens[0] == tokens[1] and tiny.kinds(model) == ["exact"]
for name in ("attention", "base_attn_implementation"):
    try:
        vlcache_hf.attach(model, {"cache_dir": sys.argv[1], name: "flash_attention_2"})
        tiny.generate(model, request, 2)
    except (ImportError, ValueError) as error:
        print("ERROR", name, error)
print("TOKENS", tokens[0])
"""


@pytest.mark.parametrize("error", ["ImportError('undefined symbol')", "OSError('libcudart.so.12')"])
def test_a_flash_attn_that_cannot_be_imported(tmp_path, error):
    package = tmp_path / "path" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"raise {error}\n")
    info = tmp_path / "path" / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    done = python(_IMPORT, tmp_path / "cache", PYTHONPATH=f"{tmp_path / 'path'}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = tiny.generate(tiny.stock("qwen3_vl"), REQUEST, 4).tolist()
    assert f"TOKENS {wanted}" in done.stdout


def test_importing_touches_no_disk(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    code = """
import os, sys
sys.dont_write_bytecode = True
import transformers, torch, accelerate, diskcache
seen = []
sys.addaudithook(lambda event, args: seen.append((event, args)) if event in ("os.mkdir", "os.rename") or (
    event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) else None)
import vlcache_hf
vlcache_hf.VLCacheConfig()
print("SEEN", [event for event in seen if "torchinductor" not in str(event)])  # torch makes that folder
"""
    places = {"HOME": str(home), "VLCACHE_DIR": str(home / "vlcache"), "HF_HOME": str(home / "hf")}
    done = python(code, **places)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SEEN []" in done.stdout
    assert not (home / "vlcache").exists() and not (home / "hf" / "vlcache").exists()


def test_importing_without_a_home():
    done = python("import vlcache_hf; print(vlcache_hf.VLCacheConfig().cache_dir)", HOME="/nonexistent", HF_HOME="")
    assert done.returncode == 0, done.stderr[-2000:]


# --- stock classes and other architectures with "vlcache"


def test_a_stock_class_runs_as_stock_and_warns_once(architecture, reference, folder, monkeypatch, caplog):
    interface.logger.warning_once.cache_clear()
    messages = []
    monkeypatch.setattr(type(interface.logger), "warning", lambda self, message, *args, **kw: messages.append(message))
    model = tiny.STOCK[architecture].from_pretrained(folder, attn_implementation="vlcache")
    assert type(model) is tiny.STOCK[architecture]
    with torch.no_grad():
        out = model(**REQUEST).logits
        torch.testing.assert_close(out, reference(**REQUEST).logits, atol=1e-5, rtol=1e-5)
    padded = tiny.batch(tiny.prompt(tiny.text(0, 3), tiny.image(0), tiny.text(1, 5)), tiny.prompt(tiny.text(5, 30)))
    for request in (REQUEST, padded):
        assert tiny.generate(model, request).tolist() == tiny.generate(reference, request).tolist()
    ours = [message for message in messages if "nothing is reused" in str(message)]
    assert len(ours) == 1 and "vlcache_hf.attach" in ours[0]
    interface.logger.warning_once.cache_clear()


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 150,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


_SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    "kind, fields",
    [
        (transformers.LlamaForCausalLM, {}),
        (transformers.Qwen3ForCausalLM, {"head_dim": 16}),
        (transformers.Qwen2ForCausalLM, _SLIDING),
    ],
)
def test_text_models_run_as_stock(kind, fields, tmp_path, monkeypatch):
    config = kind.config_class(**_SMALL, **fields)
    torch.manual_seed(0)
    reference = kind(config).eval()
    reference.save_pretrained(tmp_path / "model")
    interface.logger.warning_once.cache_clear()
    messages = []
    monkeypatch.setattr(type(interface.logger), "warning", lambda self, message, *args, **kw: messages.append(message))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="vlcache")
    assert type(model) is kind
    request = tiny.batch(tiny.prompt(tiny.text(0, 12)), tiny.prompt(tiny.text(1, 7)))
    request.pop("mm_token_type_ids")
    with torch.no_grad():
        visible = request["attention_mask"].bool()
        out, wanted = model(**request).logits, reference(**request).logits
        torch.testing.assert_close(out[visible], wanted[visible], atol=1e-5, rtol=1e-5)
    assert tiny.generate(model, request).tolist() == tiny.generate(reference, request).tolist()
    assert any("are not supported" in str(message) for message in messages)
    interface.logger.warning_once.cache_clear()


def qwen2_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "mlp_ratio": 2
    }  # fmt: skip
    text = {**_SMALL, "vocab_size": tiny.VOCAB, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tiny._TOKENS)
    torch.manual_seed(0)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def test_qwen2_vl_runs_as_stock(tmp_path):
    reference = qwen2_vl()
    reference.save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="vlcache")
    assert type(model) is transformers.Qwen2VLForConditionalGeneration
    assert tiny.generate(model, REQUEST).tolist() == tiny.generate(reference, REQUEST).tolist()
    with pytest.raises(TypeError, match="Qwen2VLForConditionalGeneration"):
        vlcache_hf.attach(model)


def test_layers_with_a_sliding_window_keep_no_kv(tmp_path):
    """Features are reused, KV is not."""
    layers = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    fields = {"layer_types": layers, "use_sliding_window": True, "sliding_window": 4}
    reference = tiny.stock("qwen2_5_vl", **fields)
    model = vlcache_hf.attach(tiny.stock("qwen2_5_vl", **fields), {"cache_dir": tmp_path / "cache"})
    for source in ("miss", "hit"):
        assert tiny.generate(model, REQUEST).tolist() == tiny.generate(reference, REQUEST).tolist()
        assert model.vlcache.last_request.in_full
        assert [image.encoder for image in model.vlcache.last_request.images] == [source]
    assert not (tmp_path / "cache" / "kv").exists()


def test_loading_warns_of_nothing(folder, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        load(folder, settings)
