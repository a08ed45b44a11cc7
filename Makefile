# New users need `make demo` and `make test`. Both first install .venv if it is missing or out of date; `make test` adds its own packages.
# Run `make check` (two minutes) after each change. `make nightly` runs the long tests, `make soak` the random ones.

BIN := .venv/bin

.PHONY: benchmarks bounds cluster-test demo demos docs docs-lock findings gpu-dry-run gpu-tests launchers scaling-data study test check nightly soak stores lint types imports tests transfer-data settings format lock clean-demo clean-demos

demo: .venv/.installed
	$(BIN)/python demo.py

# Runs prepare -> pretrain -> probe + finetune on this machine and all its GPUs. On SLURM: cluster/submit FILE.
STUDY := configs/plan/demo.yaml
study: .venv/.installed
	$(BIN)/python -m cluster run $(STUDY) $(ARGS)

# Tests the papers' claims on real images (docs/findings.md): trains unfinished runs, writes a table of results and prints the decisions.
# `make findings CLAIM=width` runs one claim: first the learning rates (some diverge), then the final plan.
FINDINGS := $(patsubst configs/plan/findings_%_rates.yaml,%,$(wildcard configs/plan/findings_*_rates.yaml))
CLAIM ?= $(FINDINGS)
findings: export OMP_NUM_THREADS ?= 1
findings: .venv/.installed $(if $(filter transfer clip_art,$(CLAIM)),transfer-data) $(if $(filter scaling,$(CLAIM)),scaling-data)
	$(if $(filter-out $(FINDINGS),$(CLAIM)),$(error CLAIM is one of $(FINDINGS)))
	$(BIN)/data_prep build configs/data_prep/fashion_mnist.yaml
	$(BIN)/data_prep index configs/data_prep/index_fashion_mnist_6k.yaml
	for claim in $(CLAIM); do \
	    plan=configs/plan/findings_$$claim; table=tests/analysis/points/findings_$$claim; \
	    $(BIN)/python -m cluster run $${plan}_rates.yaml; [ $$? -ne 130 ] || exit 130; \
	    $(BIN)/analysis collect $${plan}_rates.yaml --allow-incomplete --out $${table}_rates || exit 1; \
	    $(BIN)/python -m cluster run $$plan.yaml && $(BIN)/analysis collect $$plan.yaml --out $$table || exit 1; \
	    [ $$claim != sparse ] || $(BIN)/python benchmarks/findings.py cka || exit 1; \
	done
	$(BIN)/python benchmarks/findings.py

# Makes the datasets of docs/findings/scaling.md: 48,000 images and parts of them.
scaling-data: .venv/.installed
	$(BIN)/data_prep build configs/data_prep/fashion_mnist.yaml
	$(BIN)/data_prep index configs/data_prep/index_fashion_mnist_6k.yaml \
	    'splits.train=data/fashion-mnist/train-{000000..000007}.tar' out=data/fashion-mnist-n48
	$(BIN)/data_prep subset data/fashion-mnist-n48 --out data/fashion-mnist-n24 --fraction 0.5
	$(BIN)/data_prep subset data/fashion-mnist-n48 --out data/fashion-mnist-n12 --fraction 0.25
	$(BIN)/data_prep subset data/fashion-mnist-n48 --out data/fashion-mnist-n6 --fraction 0.125

# Makes the datasets of docs/findings/transfer.md: labeled images that each seed draws, and fixed test images.
transfer-data: .venv/.installed
	$(BIN)/data_prep build configs/data_prep/clip_art.yaml
	$(BIN)/data_prep dedup data/clip-art --out data/clip-art-duplicates.jsonl
	for name in clip_art digits; do \
	    $(BIN)/data_prep build configs/data_prep/findings_$$name.yaml && \
	    $(BIN)/data_prep index configs/data_prep/index_findings_$$name.yaml && \
	    $(BIN)/data_prep index configs/data_prep/index_findings_$${name}_rates.yaml || exit 1; \
	done
	draw() { $(BIN)/data_prep subset data/transfer-$$1 --per-class $$3 --seed $$4 --out data/transfer-$$2-$$3-seed-$$4; }; \
	for name in clip-art digits; do \
	    for number in 10 30 60; do draw $$name-rates $$name $$number 107 || exit 1; done; \
	    for number in 10 30 100; do for seed in 80 81 82 83 84; do draw $$name $$name $$number $$seed || exit 1; done; done; \
	done

# Runs the demo variants of all plans of the papers, in about 20 minutes, and collects their results for the tests of figures.
# Finished members are kept; `make clean-demos demos` starts again.
PLANS := $(wildcard configs/plan/mixer_*.yaml configs/plan/scaling_*.yaml)
demos: .venv/.installed
	@took= failed=; \
	for plan in $(PLANS); do \
	    began=$$(date +%s); $(BIN)/python -m cluster run $$plan --demo; code=$$?; [ $$code -ne 130 ] || exit 130; \
	    [ $$code -eq 0 ] || failed="$$failed $$plan"; \
	    took="$$took$$(($$(date +%s) - began)) s  $$plan\n"; \
	done; \
	printf "\n$$took"; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }
	$(BIN)/python -m analysis collect $(PLANS) --demo --out tests/analysis/points/demos.parquet

test: .venv/.dev
	$(MAKE) --no-print-directory lint imports
	$(MAKE) --no-print-directory -j 2 types tests # types use the cores that are idle while pytest starts

QUICK := "not processes and not slow and not nightly and not soak and not stores and not benchmarks"
# Runs format, lint, types, imports, and the tests without a mark. Prints tests that take more than 3 s: mark them as slow, unless the machine is busy.
check: .venv/.dev
	$(MAKE) --no-print-directory lint types imports
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 10 --durations-min 3 -m $(QUICK)

# Runs long tests and those with other tools: SLURM on this machine (as root; apt-get install slurm-wlm munge slurmdbd mariadb-server),
# every page of docs, wheels, compilers.
nightly: .venv/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m nightly $(ARGS)

# Tests the version bounds of pyproject.toml: installs the lowest allowed versions of direct dependencies on Python 3.11, or the newest
# versions on Python 3.13, into .venv/bounds. requirements.lock and [tool.uv] do not apply. Then it runs the tests of `make check` and
# tests/distributed. `make bounds` tests both ends. `make bounds-lowest PYTHON=/path/to/python` uses another Python.
bounds: bounds-lowest bounds-highest
bounds-lowest: PYTHON ?= 3.11
bounds-highest: PYTHON ?= 3.13
bounds-lowest bounds-highest: UV ?= $(or $(wildcard $(BIN)/uv),uv)
bounds-lowest bounds-highest: bounds-%:
	$(UV) venv --clear --python $(PYTHON) .venv/bounds
	$(UV) pip install --no-config --python .venv/bounds --resolution $(subst lowest,lowest-direct,$*) --all-extras --group dev -r pyproject.toml
	$(UV) pip install --no-config --python .venv/bounds --no-deps --editable .
	.venv/bounds/bin/python -m tests.reference_pages
	.venv/bounds/bin/python -m pytest -q -n 2 --dist loadfile -m $(QUICK) $(ARGS)
	.venv/bounds/bin/python -m pytest -q tests/distributed $(ARGS)

# Runs the random tests with SOAK seeds each, from SOAK_SEED on: more kills, more mutants. pytest prints both; set them to repeat a run.
SOAK ?= 20
SOAK_SEED ?= $(shell date +%s)
soak: .venv/.dev
	SOAK=$(SOAK) SOAK_SEED=$(SOAK_SEED) $(BIN)/python -m pytest -n 2 --dist load -m soak $(ARGS)

# Also prints the size of each package with its budget, and the violations of language rules.
lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck --external-sources .ci/run cluster/submit cluster/snapshot $$(git ls-files '*.sh' '*.slurm')
	$(BIN)/shellcheck --external-sources --shell=bash cluster/site.env
	$(BIN)/python -m deptry data_prep pretrain finetune analysis cluster wide_mlps
	$(BIN)/python -m tests.budgets
	$(BIN)/python -m tests.language

types: .venv/.dev
	$(BIN)/mypy

imports: .venv/.dev
	$(BIN)/lint-imports

tests: .venv/.dev
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not nightly and not stores and not benchmarks and not cuda"

# Runs the smallest size of every benchmark, with its peers (FFCV needs: apt-get install libturbojpeg0-dev libopencv-dev pkg-config;
# under REQUIRE_FFCV=1 a missing FFCV fails).
benchmarks: .venv/.dev
	$(BIN)/python -m pytest -m benchmarks tests/test_benchmarks.py $(ARGS)

# Tests buckets other than s3 with local servers. Azure's server is azurite, from npm. Without npm its tests skip, but fail under
# REQUIRE_STORES=1. (azurite 3.37 needs node 22.)
STORES ?= .venv/stores
stores: .venv/.dev
	[ -x $(STORES)/node_modules/.bin/azurite-blob ] || ! command -v npm >/dev/null || \
	    npm install --prefix $(STORES) --no-audit --no-fund --no-package-lock azurite@3.35.0
	STORES=$(STORES) $(BIN)/python -m pytest -n 2 --dist loadfile -m stores $(ARGS)

# Starts a private SLURM of four nodes on loopback, and removes it afterwards. Needs root and apt-get install slurm-wlm munge.
cluster-test: .venv/.dev
	REQUIRE_SLURM=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/slurm tests/cluster

# Runs the tests on a GPU (tests/test_cuda.py), which skip without one, or every command of benchmarks/gpu.py at small sizes on this CPU.
gpu-tests: .venv/.dev
	$(BIN)/python -m pytest -m cuda tests/test_cuda.py $(ARGS)

gpu-dry-run: .venv/.dev
	$(BIN)/python benchmarks/gpu.py --quick $(ARGS)

# Reads cluster/skypilot.yaml with SkyPilot's own parser. SkyPilot gets its own environment, because it would change many of our packages.
launchers: .venv/.installed
	[ -x .venv/skypilot/bin/python ] || $(BIN)/uv venv --quiet --python $(BIN)/python .venv/skypilot
	$(BIN)/uv pip install --quiet --python .venv/skypilot skypilot==0.14.1
	SKYPILOT_DISABLE_USAGE_COLLECTION=1 .venv/skypilot/bin/python -c "import sky; print(sky.Task.from_yaml('cluster/skypilot.yaml'))"

# Writes docs/reference/ and configs/schemas/ (git ignores both), and the table of docs/papers.md.
settings: .venv/.installed
	$(BIN)/python -m tests.reference_pages
	$(BIN)/python -m tests.papers_page

# Builds the documentation site into build/site, and checks its links and that pages load nothing from the network.
docs: .venv/.installed .venv/docs/.installed
	$(BIN)/python -m tests.reference_pages
	.venv/docs/bin/zensical build --strict --clean
	$(BIN)/python -m tests.site_check build/site
	@echo "The site is build/site/index.html. Search needs a server: python3 -m http.server -d build/site"

# Zensical, which builds the site, has an environment of its own: users do not need it.
.venv/docs/.installed: requirements-docs.lock | .venv/.installed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv/docs
	$(BIN)/uv pip install --quiet --python .venv/docs --require-hashes -r requirements-docs.lock
	touch $@

docs-lock: .venv/.installed
	echo zensical==0.0.73 | $(BIN)/uv pip compile --quiet - --universal --generate-hashes --python-version 3.11 --no-annotate \
	    --custom-compile-command "make docs-lock" --output-file requirements-docs.lock

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Resolves pyproject.toml again; ARGS="--upgrade" or ARGS="--upgrade-package NAME" for newer versions.
lock: .venv/.installed
	sh install.sh lock $(ARGS)

clean-demo:
	rm -rf runs/demo data/demo-pretrain data/demo-transfer data/demo-pretrain-images data/demo-transfer-images

clean-demos:
	rm -rf $(PLANS:configs/plan/%.yaml=runs/plans/%_demo) data/demos data/demos-second data/demos-third data/demos-images data/demos-second-images data/demos-third-images

# `make TARGET CUDA=cu126` first installs that build of torch. `CUDA=cu126 sh install.sh torch` only installs it (see install.sh).
ifeq ($(origin CUDA),command line)
ifneq ($(CUDA),$(shell cat .venv/cuda 2>/dev/null))
.PHONY: .venv/.installed .venv/.dev
endif
else
unexport CUDA
endif

# `sh install.sh dev` installs all packages of `sh install.sh`, and those of the tests.
.venv/.dev: requirements-dev.lock
.venv/.installed .venv/.dev: requirements.lock pyproject.toml install.sh
	sh install.sh $(filter dev,$(subst ., ,$@))
	$(BIN)/python -m tests.reference_pages
