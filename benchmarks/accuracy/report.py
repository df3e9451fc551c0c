"""Results as JSON, as a text table and as a plot, and raw measurements that a stopped run takes up again."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .questions import CONTEXTS, Batch, file_batches, tiny_batches

RESULTS = Path(__file__).resolve().parent / "results"


class Raw:
    """One JSON object a line, by name; what is there already need not be measured again.

    Args:
        path (`Path`): the file.
        settings (`dict`): what the measurements depend on; others in the file are an error.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines()
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the run was stopped in the middle of a line
                continue
            if number == 0 and entry != settings:
                raise ValueError(
                    f"{path} was measured with other settings; delete it, or give another --name: {entry}."
                )
            if number:
                self.found[entry.pop("name")] = entry
        if not lines:
            self._write(settings)
        elif not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Keeps the measurements of one batch."""
        self._write({"name": name, **entry})
        self.found[name] = entry

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def measured_with(args: argparse.Namespace, model: str, *more: str) -> dict[str, Any]:
    """What raw measurements depend on: options, and the state of a local checkpoint.

    Args:
        args (`argparse.Namespace`): of `parser`.
        model (`str`): checkpoint folder or Hub id.
        *more (`str`): options of one experiment.
    """
    names = ("questions", "layouts", "contexts", "sizes", "dtype", "max_new_tokens", *more)
    state = {file.name: _digest(file) for file in sorted(Path(model).glob("*.safetensors"))}
    return {"model": model, "state": state, **{name: str(getattr(args, name)) for name in names}}


def environment(*models: str) -> dict[str, Any]:
    """What a result was measured with: command, versions, and SHA-256 of the weights of local checkpoints."""
    files = [file for model in models for file in sorted(Path(model).glob("*.safetensors"))]
    return {
        "command": f"python -m benchmarks.accuracy.{Path(sys.argv[0]).stem} " + " ".join(sys.argv[1:]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "weights": {str(file): _digest(file) for file in files},
    }


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(2**24):
            digest.update(part)
    return digest.hexdigest()


def write(folder: Path, name: str, result: dict[str, Any], text: str) -> None:
    """`name.json` and `name.txt`; the text is printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


def _plain(value: Any) -> Any:
    """Numbers of four digits behind the point, and `None` for what JSON cannot say."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first to the left, numbers to the right."""
    widths = [max(len(line[index]) for line in (columns, *rows)) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join([title, "", line(columns), line(["-" * width for width in widths]), *map(line, rows)])


def figure(rows: int, columns: int, width: float = 4.2, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes as a two-dimensional array."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )


def save(drawn: Any, folder: Path, name: str) -> None:
    """`name.png`."""
    from matplotlib import pyplot

    drawn.savefig(folder / f"{name}.png", dpi=110)
    pyplot.close(drawn)


def parser(description: str, count: int) -> argparse.ArgumentParser:
    """Options that all experiments share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--questions", type=Path, help="JSON lines of image, auxiliary, question, answer")
    options.add_argument("--count", type=int, default=count, help=f"questions (default {count})")
    options.add_argument("--seed", type=int, default=1, help="of the questions of the tiny models")
    options.add_argument("--layouts", nargs="+", default=["after", "before"], help="where the question stands")
    options.add_argument("--contexts", nargs="+", default=list(CONTEXTS), help="kinds of context change")
    options.add_argument("--sizes", nargs="+", type=int, default=[8, 12, 16], help="grids of the tiny models")
    options.add_argument("--batch-tokens", type=int, default=4096, help="image tokens of a batch, tiny models")
    options.add_argument("--batch", type=int, default=8, help="questions of a batch, with --questions")
    options.add_argument("--max-new-tokens", type=int, default=4)
    options.add_argument("--dtype", default="float32", help="float32, bfloat16, or auto: as the checkpoint")
    options.add_argument("--device", default="cpu", help="cpu, cuda, or auto: accelerate's choice")
    options.add_argument("--minutes", type=float, default=math.inf, help="then report what has been measured")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options.add_argument(
        "--work", type=Path, default=RESULTS / ".work", help="folder of raw measurements, for resuming"
    )
    options.add_argument("--name", help="of the result files")
    return options


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """The questions that options ask for, drawn one batch at a time: pictures take memory."""
    if args.questions:
        return file_batches(args.questions, args.count, args.layouts, args.batch)
    return tiny_batches(args.count, args.seed, args.layouts, args.sizes, args.batch_tokens)


def percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.{digits}f}"
