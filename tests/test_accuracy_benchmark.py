"""The experiments of `benchmarks/accuracy`: their numbers against known ones, and a few questions of each command."""

import json

import numpy as np
import pytest
import torch

from benchmarks.accuracy import accuracy, conditions, figures, guard, inject, metrics, questions
from benchmarks.accuracy.asking import Asker, ColdRequest, asker
from benchmarks.accuracy.report import Raw
from benchmarks.accuracy.signals import Probes, candidates, probed, recording, stacked
from vlcache_hf import VLCache

pytest.importorskip("matplotlib")
checkpoint = pytest.importorskip("tiny_models.checkpoint")

COMMON = ["--count", "4", "--sizes", "4", "--batch-tokens", "32", "--max-new-tokens", "2", "--contexts", "question"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of the tiny models' shape, with their processor."""
    path = tmp_path_factory.mktemp("models") / "random"
    checkpoint.save(checkpoint.build_model(0), path)
    return path


@pytest.fixture(scope="module")
def one(folder):
    with asker(str(folder), "float32", max_new_tokens=2) as found:
        yield found


def run(module, models, out, *more):
    """One command with few questions; what it wrote."""
    module.main([*map(str, models), *COMMON, "--out", str(out), "--work", str(out / "work"), *more])
    names = {path.suffix: path for path in out.iterdir() if path.is_file()}
    assert set(names) == {".json", ".txt", ".png"}
    assert names[".png"].read_bytes().startswith(b"\x89PNG")
    assert "nan" not in names[".txt"].read_text().replace("nan ", "")
    return json.loads(names[".json"].read_text())


# --- numbers


def test_wilson_interval():
    # Brown, Cai and DasGupta (2001); R: prop.test(15, 50, correct = FALSE)
    assert metrics.wilson(15, 50) == pytest.approx((0.19103, 0.43747), abs=1e-4)
    assert metrics.wilson(0, 20)[0] == 0.0 and metrics.wilson(0, 20)[1] == pytest.approx(0.16113, abs=1e-4)
    assert metrics.wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_interval_of_paired_differences():
    differences = np.array([1] * 30 + [-1] * 10 + [0] * 60)
    low, high = metrics.bootstrap(differences)
    error = differences.std() / 10
    assert low == pytest.approx(0.2 - 1.96 * error, abs=0.02)
    assert high == pytest.approx(0.2 + 1.96 * error, abs=0.02)
    assert metrics.bootstrap(np.ones(5)) == (1.0, 1.0)
    assert metrics.bootstrap(differences) == (low, high)  # the same resamples every time


def test_kl_is_that_of_torch():
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 3, 7)) * 3
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=torch.tensor(p)),
        torch.distributions.Categorical(logits=torch.tensor(q)),
    )
    np.testing.assert_allclose(metrics.kl(p, q), expected.numpy(), rtol=1e-9)
    assert metrics.kl(p, p).max() == 0.0


def test_auc_and_threshold():
    assert metrics.auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75  # the example of scikit-learn
    assert metrics.auc([1, 1], [True, False]) == 0.5
    assert np.isnan(metrics.auc([1, 2], [True, True]))
    assert metrics.best_threshold([0.1, 0.2, 0.6, 0.7], [False, False, True, True]) == pytest.approx(0.4)
    assert metrics.best_threshold([0.1, 0.2], [False, False]) == np.inf
    assert metrics.rates(np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]), 2.5) == (0.5, 0.5)


@pytest.mark.parametrize("budget", conditions.BUDGETS)
@pytest.mark.parametrize("layers", (1, 6, 36))
def test_front_loaded_schedule_keeps_its_budget(budget, layers):
    schedule = conditions.front_loaded(budget, layers)
    assert schedule.mean == pytest.approx(budget, rel=0.02)
    assert max(schedule.ratios) <= conditions.HIGHEST


def test_conditions_start_with_the_full_computation():
    assert conditions.conditions(6, names=["prefix"])[0].kind == "stock"
    names = [row.name for row in conditions.conditions(6)]
    assert len(set(names)) == len(names)


def test_raw_measurements_are_taken_up(tmp_path):
    path = tmp_path / "raw.jsonl"
    Raw(path, {"model": "a"}).add("first", {"x": 1})
    with path.open("a") as file:
        file.write('{"name": "broken')
    again = Raw(path, {"model": "a"})
    assert again.found == {"first": {"x": 1}}
    again.add("second", {"x": 2})
    assert set(Raw(path, {"model": "a"}).found) == {"first", "second"}
    with pytest.raises(ValueError, match="other settings"):
        Raw(path, {"model": "b"})


# --- requests


def batch(count=2, layout="before"):
    return next(questions.tiny_batches(count, 3, [layout], [4], 16 * count)).questions


def test_a_cold_request_is_an_error(one):
    asked = batch()
    inputs = one.inputs([question.messages for question in asked])
    with pytest.raises(ColdRequest):
        one.reuse(inputs, "nothing is stored here", "reused", schedule=0.1)
    one.store([question.messages for question in asked], "same")
    assert set(one.reuse(inputs, "same", "exact").shares()) == {0.0}
    with pytest.raises(ColdRequest):
        one.reuse(inputs, "same", "reused", schedule=0.1)


def test_an_exact_hit_that_is_not_stocks_answer_is_an_error(one):
    stock = one.stock(one.inputs([question.messages for question in batch()]))
    accuracy._check_exact(one, stock, stock)
    other = type(stock)(stock.texts, stock.tokens, stock.logits + 1.0, [])
    with pytest.raises(AssertionError, match="not stock's answer"):
        accuracy._check_exact(one, stock, other)


def test_signal_of_the_present_guard_is_its_deviation(one):
    asked = batch()
    inputs = one.inputs([question.messages for question in asked])
    one.store_earlier(asked, "caption")
    guarded = one.reuse(inputs, "caption", "reused", schedule=0.0, guard="warn", guard_threshold=1e9)
    with recording() as recorder:
        one.reuse(inputs, "caption", "reused", policy=Probes(), schedule=0.0)
    for index, image in enumerate(guarded.images):
        present = candidates(one.layers)[0]
        assert present.value(stacked(recorder.last[index])) == pytest.approx(image.deviation, rel=1e-4)


def test_probed_tokens():
    assert probed(10) == list(range(10))
    assert len(probed(256)) == 32 and probed(256)[16:18] == [23, 38]
    assert sorted(set(probed(40))) == probed(40)


def test_injected_kv(folder):
    """At layer 0 the KV of any context, moved to its place, is the picture's own."""
    inject.register()
    stock = checkpoint.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    pictures = figures.Pictures(Asker(stock, checkpoint.build_processor(), 2))
    question = batch(1)[0]
    own, here = pictures.kv(question.messages)
    other, there = pictures.kv(question.earlier["caption"][-1])
    assert here != there
    stored = inject.moved(stock, other, here - there)
    for mine, moved in zip(own[0], stored[0], strict=True):
        torch.testing.assert_close(moved, mine, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stored[1][0], own[1][0], rtol=1e-3)
    found = pictures.measure(question, "caption")
    direct, *rows = found["layers"]
    assert all(row[0] == pytest.approx(direct[0], rel=1e-3) for row in rows)
    assert np.mean(found["prefix 0.3"]) < np.mean(found["prefix 0"])
    assert found["prefix 0"] == found["suffix 0"]


# --- commands


def test_accuracy_command(folder, tmp_path):
    rows = ["exact", "encoder", "none", "prefix 0.3", "cacheblend 0.1"]
    result = run(accuracy, [folder], tmp_path, "--rows", *rows)
    cells = {name: row["question"] for name, row in result["all"].items()}
    assert cells["full (stock)"]["kl"] == 0.0 and cells["full (stock)"]["recomputed"] == 1.0
    assert cells["exact hit"]["kl"] < 1e-5 and cells["exact hit"]["recomputed"] == 0.0
    assert cells["encoder only"]["recomputed"] == 1.0
    assert cells["none (r = 0)"]["kl"] > cells["prefix 0.3"]["kl"] > 0.0
    assert cells["cacheblend 0.1"]["recomputed"] > 2 / 6  # all tokens of the layers that it looks at


def test_guard_command(folder, tmp_path):
    result = run(guard, [folder], tmp_path, "--single", "1", "--count", "8")
    assert all(row["expected"] for row in result["one by one"]["random"])


def test_figures_command(folder, tmp_path):
    result = run(figures, [folder], tmp_path, "--count", "2")
    assert set(result["figures"]) == {"after / question", "before / question"}


def test_questions_of_a_file(folder, tmp_path):
    from skimage import data, io

    lines = []
    for number, picture in enumerate((data.astronaut(), data.coffee())):
        io.imsave(tmp_path / f"{number}.png", picture[:128, :128])
        lines.append(
            {"image": f"{number}.png", "auxiliary": "What color is it?", "question": "Which digit is at row 1?"}
        )
        lines[-1]["answer"] = "7"
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    arguments = ["--questions", str(path), "--contexts", *questions.CONTEXTS, "--rows", "exact", "prefix 0.1"]
    result = run(accuracy, [folder], out, *arguments)
    assert result["all"]["prefix 0.1"]["two"]["n"] == 4  # two lines in two layouts
    path.write_text('{"image": "0.png"}')
    with pytest.raises(ValueError, match=r"lacks \['answer', 'auxiliary', 'question'\]"):
        list(questions.file_batches(path, 1, ["after"], 1))


def test_cache_settings_of_all_rows_are_valid():
    for row in conditions.conditions(6):
        VLCache(**row.settings)
