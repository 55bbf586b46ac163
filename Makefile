# Every target sets up its own environment first; Python 3.11 or 3.12, pip and make are enough.
CANDIDATES := python3 python3.12 python3.11 python
supported = $(shell $(1) -c 'import sys; print(sys.version_info[:2] in ((3, 11), (3, 12)))' 2>/dev/null)
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(if $(filter True,$(call supported,$(p))),$(p))))
NEXT ?= python3.12
VENV ?= .venv
# The environments of test-harness and test-aot, which may be others that are done with.
HARNESS ?= .venv-harness
AOT ?= .venv-aot
RUN ?= runs/addressing_demo
ENCODINGS ?= rope,fox,tape+alibi
# Names with + are encodings put in place, their new part starting at nothing.
RETROFITS ?= base,scaled,tape,lora,drope,rope+alibi:slopes=learned_from_zero,tape+alibi:slopes=learned_from_zero
QUESTION ?= q d m c x a k f t b h z +5 c?
MODEL ?= tape
BIN := $(VENV)/bin
DOCS_VENV ?= .venv-docs
# Without its advertisement of another program.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs
# The tests keep both cores busy: one process each.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help ask demo play-models addition-demo compare-demo arena-demo extend-demo retrofit evidence evidence-places \
	evidence-arena evidence-quick test test-slow test-next test-harness test-aot faults lint parity benchmarks \
	docs docs-serve lock audit wheel clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

demo: $(VENV)/.ready  ## train TAPE and RoPE to find places by content, and show what came out
	$(BIN)/python -m train.main compare --config=configs/addressing_demo.py --run=$(RUN) \
		--encodings=tape+alibi,rope+alibi

ask: $(VENV)/.ready  ## ask a trained demo model: make ask QUESTION="c b a +1 b?" MODEL=rope
	@$(BIN)/python -m train.main ask --model=docs/play/models/$(MODEL).js '$(QUESTION)'

play-models: $(VENV)/.ready  ## train the models of make ask and docs/play/index.html anew, in ten minutes
	$(BIN)/python -m docs.play.make

addition-demo: $(VENV)/.ready  ## the same on addition
	$(BIN)/python -m train.main compare --config=configs/addition_demo.py --run=runs/addition_demo \
		--encodings=tape,rope

compare-demo: $(VENV)/.ready  ## train four encodings on bytes with three seeds each, and say who won
	$(BIN)/python -m train.main compare --config=configs/bytes_demo.py --run=runs/bytes_demo \
		--encodings=tape,rope,alibi,sinusoidal --seeds=3

arena-demo: $(VENV)/.ready  ## the same of other encodings: make arena-demo ENCODINGS=rope,cope,tape+fox
	$(BIN)/python -m train.main compare --config=configs/bytes_demo.py --run=runs/arena \
		--encodings=$(ENCODINGS) --seeds=3

extend-demo: $(VENV)/.ready  ## train a small model on 64 bytes, adapt it to 128 by every method
	$(BIN)/python -m train.main train --config=configs/bytes_demo.py --run=runs/short --resume \
		 --config.model.position.kind=rope --config.task.sequence_length=64 \
		--config.task.passkeys=0.5 --config.task.passkey_form=short \
		--config.train.steps=1200 --config.train.batch_size=32
	$(BIN)/python -m train.main compare --config=configs/context_extension_demo.py \
		--run=runs/longer_demo --methods=base,scaled,tape,lora,longlora,theta,full --seeds=3

retrofit: $(VENV)/.ready  ## train a model on 512 bytes, retrofit it to 2,048 by rival methods: hours; continues
	$(BIN)/python -m train.main train --config=configs/retrofit_base.py --run=runs/short_base --resume
	$(BIN)/python -m train.main compare --config=configs/retrofit_demo.py --run=runs/retrofit --seeds=5 \
		--methods=$(RETROFITS) --suite=ruler:lengths=512,2048:form=short

evidence: $(VENV)/.ready  ## test what is claimed of TAPE, hours; continues where it was stopped
	$(BIN)/python -m research.main evidence

evidence-places: $(VENV)/.ready  ## the same of where TAPE is ahead: tasks of finding places, hours
	$(BIN)/python -m research.main evidence --suite=places

evidence-arena: $(VENV)/.ready  ## the same of encodings that recent models have, days
	$(BIN)/python -m research.main evidence --suite=arena

evidence-quick: $(VENV)/.ready  ## make a few of these runs again, in minutes
	$(BIN)/python -m research.main evidence --quick
	$(BIN)/python -m research.main evidence --suite=places --quick

# TESTS=--cases=1 takes one case of each test; TESTS=tests/library those of the library alone.
test: $(VENV)/.ready  ## the tests, in about six minutes on two cores
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: $(VENV)/.ready  ## the tests that take longer
	$(PYTEST) -m slow $(TESTS)

test-next:  ## the tests under Python 3.12 and the newer jax that it gets
	$(MAKE) test VENV=.venv-next PYTHON=$(NEXT)

test-harness: $(HARNESS)/.harness  ## the tests that need lm_eval, torch and transformers
	$(HARNESS)/bin/python -m pytest tests/train/test_harness.py \
		tests/library/pretrained/test_in_transformers.py tests/benchmarks/test_torch_attention.py

$(HARNESS)/.harness: requirements.txt
	$(MAKE) $(HARNESS)/.ready VENV=$(HARNESS)
	$(HARNESS)/bin/python -m pip install --quiet lm_eval torch "transformers>=5" accelerate peft
	touch $@

# What compiles for NVIDIA's GPUs on a machine without one, in versions that belong together.
test-aot: $(AOT)/.aot  ## the kernels compiled for GPUs that are not here: nothing spills
	$(AOT)/bin/python -m pytest tests/benchmarks/test_aot.py $(TESTS)

$(AOT)/.aot: requirements.txt
	$(MAKE) $(AOT)/.ready VENV=$(AOT) PYTHON=$(NEXT)
	jax=$$($(AOT)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(AOT)/bin/python -m pip install --quiet --no-deps jax-cuda13-plugin==$$jax \
		jax-cuda13-pjrt==$$jax nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink nvidia-cuda-runtime \
		nvidia-cuda-cupti nvidia-cuda-crt
	touch $@

faults: $(VENV)/.ready  ## break training in many ways, and count what is lost
	$(BIN)/python -m tests.faults

lint: $(VENV)/.ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

parity: $(VENV)/.ready  ## compare with the recorded runs of the published code
	$(BIN)/python -m tape_jax.parity tests/golden/*.npz

benchmarks: $(VENV)/.ready  ## the benchmarks that need nothing but a CPU
	$(BIN)/python -m benchmarks.train_step --model small --repeats 20
	$(BIN)/python -m benchmarks.attention --lengths 256 1024 4096 16384
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.load

docs: $(DOCS_VENV)/.ready  ## build the documentation as a site, site/index.html
	$(MKDOCS) build --quiet --strict

docs-serve: $(DOCS_VENV)/.ready  ## show the site at http://127.0.0.1:8000, and every change at once
	$(MKDOCS) serve

lock: $(VENV)/.ready  ## write down the versions that are installed for both supported Pythons
	$(MAKE) .venv-next/.ready VENV=.venv-next PYTHON=$(NEXT)
	$(BIN)/python .ci/lock.py $(VENV) .venv-next > requirements.lock.new
	mv requirements.lock.new requirements.lock

audit: $(VENV)/.ready  ## look the locked versions up among known vulnerabilities; needs the internet
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit
	.venv-audit/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip

wheel: $(VENV)/.ready  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove environments and caches; runs/ stays
	rm -rf .venv .venv-next .venv-aot .venv-audit .venv-docs .venv-harness .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site

$(VENV)/.ready: requirements.txt
$(DOCS_VENV)/.ready: requirements-docs.txt
$(VENV)/.ready $(DOCS_VENV)/.ready:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; none of these is one: $(CANDIDATES)"; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@
