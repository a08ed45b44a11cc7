# The two commands of a new user are `make demo` and `make test`. Both set up .venv first if it is missing or out of date.

BIN := .venv/bin

.PHONY: cluster-test demo study test lint types arrows tests format lock clean-demo

demo: .venv/.installed
	$(BIN)/python demo.py

# prepare -> pretrain -> probe + finetune on this machine and all its GPUs; on SLURM: cluster/submit FILE.
STUDY := configs/plan/demo.yaml
study: .venv/.installed
	$(BIN)/python -m cluster.plan run $(STUDY) $(ARGS)

test: .venv/.installed
	$(MAKE) --no-print-directory lint types arrows tests

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

arrows:
	$(BIN)/lint-imports

tests:
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Starts a private SLURM of four nodes on loopback, and leaves nothing behind. Root; apt-get install slurm-wlm munge.
cluster-test: .venv/.installed
	REQUIRE_SLURM=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/slurm tests/cluster

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Resolves pyproject.toml anew; ARGS="--upgrade" or ARGS="--upgrade-package NAME" for newer versions.
lock: .venv/.installed
	sh install.sh lock $(ARGS)

clean-demo:
	rm -rf runs/demo data/demo-pretrain data/demo-transfer data/demo-pretrain-images data/demo-transfer-images

.venv/.installed: requirements.lock pyproject.toml install.sh
	sh install.sh
