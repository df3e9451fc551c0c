# `make demo`, `make test` and `make lint` set up what they need in $(VENV); a second run starts at once.
#
#   make test TESTS=tests/test_plan.py      some of the tests
#   make test WORKERS=0                     in one process
#   make demo DEMO=--quick                  options of examples/demo.py
#   make test PY=/path/to/python            use that environment as it is, set up nothing
#   make test CONSTRAINTS=                  newest versions instead of the pinned ones

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/ci.txt
TESTS ?=
WORKERS ?= 2
DEMO ?=

DOCUMENTS := .demo/documents

ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: demo test lint format setup clean
.DEFAULT_GOAL := test

setup: $(READY)

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	touch $@

# One thread for each worker: two workers with two threads each are slower than one after the other on two cores.
test: $(READY)
	$(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1) $(PY) -m pytest -q \
		$(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist worksteal) --timeout 600 $(TESTS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

demo: $(READY) $(DOCUMENTS)/.ready
	$(PY) examples/demo.py $(DEMO)

# A few pages (MIT) that lie in the source archive of a package. The demo has a smaller one of its own, so a failure
# here is no reason to stop.
$(DOCUMENTS)/.ready: | $(READY)
	mkdir -p $(DOCUMENTS)
	$(PY) -m pip download --quiet --no-deps --no-binary img2table --dest .demo/download img2table==2.0.0 \
		&& tar -xzf .demo/download/img2table-2.0.0.tar.gz -C $(DOCUMENTS) --strip-components=3 \
			img2table-2.0.0/examples/data \
		&& touch $@ \
		|| echo "No img2table pages: the demo goes on with the scan that comes with scikit-image."

clean:
	rm -rf $(VENV) .demo build dist .pytest_cache .mypy_cache .ruff_cache
